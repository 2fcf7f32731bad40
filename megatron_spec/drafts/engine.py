"""Linears and norms of a draft from Transformer Engine's modules, and its fp8 training.

The modules compute what `F.linear` and `F.rms_norm` do on this rank's shard; collectives between them are those of
`linear.py` (megatron-core's mappings), so every layout works, q, k and v share one gathered input, and rows can be
padded to the multiples that fp8 needs. Attention stays `ops/ttt_attention.py`: Transformer Engine has none with a trunk
and branches, or over blocks.

A module's weight is the draft's parameter, registered by the draft alone, so names and checkpoints do not depend on the
modules. Histories of delayed scaling are not saved: they start anew when a run resumes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megatron_spec.config import Fp8Recipe, UserError
from megatron_spec.planning.draft_modules import RECIPES

log = logging.getLogger(__name__)


def modules() -> Any:
    """Transformer Engine: Linear, RMSNorm, autocast or fp8_autocast."""
    import transformer_engine.pytorch as te

    return te


def recipe_of(name: Fp8Recipe) -> Any:
    """Transformer Engine's recipe of a name, with E4M3 activations and E5M2 gradients where the recipe has a choice.

    Raises UserError where this installation lacks it.
    """
    from transformer_engine.common import recipe

    cls = getattr(recipe, RECIPES[name].name, None)
    if cls is None:
        raise UserError(f"--draft-fp8-recipe {name}: this Transformer Engine has no {RECIPES[name].name}; update it")
    # Replicas have equal weights but scale on their own: a rank without supervised rows takes part in no collective.
    return cls(reduce_amax=False) if name == "delayed" else cls()


def _unless_empty(x: Tensor, engine: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> Tensor:
    """engine(x), or plain(x) where x has no rows: Transformer Engine's modules refuse that.

    An expert may have no tokens, and a rank or micro-batch no supervised rows from some draft step on. `plain` gives a
    result of the same shape and dtype, and gradients of zeros, so autograd meets the same parameters and collectives.
    """
    return engine(x) if x.numel() else plain(x)


class TransformerEngine:
    """Transformer Engine's modules for one draft.

    Args:
        recipe: fp8 recipe of training; None: high precision.

    Raises UserError for a recipe that this installation or GPU lacks.
    """

    def __init__(self, recipe: Fp8Recipe | None = None) -> None:
        self.te, self.recipe = modules(), None
        self.active = False
        self.multiple = 1 if recipe is None else RECIPES[recipe].rows
        if recipe is not None:
            self.recipe = recipe_of(recipe)
            self._check_support(recipe)
        precision = "in high precision" if recipe is None else f"in fp8 while training, recipe {recipe}"
        log.info("draft: linears and norms of Transformer Engine, %s", precision)

    def _check_support(self, name: Fp8Recipe) -> None:
        check = getattr(self.te, RECIPES[name].check, None)
        supported, reason = (True, "") if check is None else check(return_reason=True)
        if not supported:
            raise UserError(f"--draft-fp8-recipe {name}: {reason}")

    def linear(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device | str, exact: bool
    ) -> tuple[nn.Parameter, EngineProduct]:
        """A weight [outputs, inputs], NaN, and the product with it.

        Args:
            exact: the product stays in high precision in fp8 training.
        """
        unset = functools.partial(nn.init.constant_, val=float("nan"))
        module = self.te.Linear(inputs, outputs, bias=False, params_dtype=dtype, device=device, init_method=unset)
        return module.weight, EngineProduct(self, module, exact)

    def norm(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
        """A weight [size], NaN, and the RMSNorm with it."""
        module = self.te.RMSNorm(size, eps=eps, dtype=dtype, device=device)
        nn.init.constant_(module.weight, float("nan"))
        return module.weight, lambda x: _unless_empty(x, module, lambda x: x * module.weight)

    def autocast(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Transformer Engine's context."""
        if hasattr(self.te, "autocast"):
            return self.te.autocast(enabled=enabled, recipe=self.recipe)  # type: ignore[no-any-return]
        return self.te.fp8_autocast(enabled=enabled, fp8_recipe=self.recipe)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def fp8(self) -> Iterator[None]:
        """One forward of the draft in training: in fp8, if there is a recipe."""
        if self.recipe is None:
            yield
            return
        self.active = True
        try:
            with self.autocast(True):
                yield
        finally:
            self.active = False


class EngineProduct:
    """x W^T (+ b) by a linear of Transformer Engine, which holds no bias of its own.

    Not an `nn.Module`: the draft registers the weight, under its own name.
    """

    def __init__(self, engine: TransformerEngine, module: Any, exact: bool) -> None:
        self.engine, self.module, self.exact = engine, module, exact

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `F.linear`; `weight` is the module's, or stands in for it (fake quantisation)."""

        def _computed(x: Tensor) -> Tensor:
            out = self._product(x.flatten(0, -2).contiguous(), weight).unflatten(0, x.shape[:-1])
            return out if bias is None else out + bias

        return _unless_empty(x, _computed, lambda x: F.linear(x, weight, bias))

    def _product(self, x_RH: Tensor, weight: Tensor) -> Tensor:
        rows, engine = len(x_RH), self.engine
        if not engine.active:
            return self._module(x_RH, weight)
        if self.exact:
            with engine.autocast(False):
                return self._module(x_RH, weight)
        return self._module(F.pad(x_RH, (0, 0, 0, -rows % engine.multiple)), weight)[:rows]

    def _module(self, x_RH: Tensor, weight: Tensor) -> Tensor:
        out: Tensor
        if weight is self.module.weight:
            out = self.module(x_RH)
        else:
            out = functional_call(self.module, {"weight": weight}, (x_RH,))
        return out
