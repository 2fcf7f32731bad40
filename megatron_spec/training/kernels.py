"""Whose kernels update a draft: Adam, gradient norm, clipping and sums of weight gradients.

megatron-core takes the first of Transformer Engine, apex and torch that imports; a program of ours hides the first
unless one of its flags names it (`runtime/optional.py`). `choose` can name another one; states are the same within
rounding, and a checkpoint of one continues under any other (`checkpoint/optimizer_state.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import optimizer as core
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mixed_precision

from megatron_spec.config import OptimizerImpl, UserError
from megatron_spec.ops import products
from megatron_spec.planning.paths import NO_PATHS, Paths
from megatron_spec.runtime import optional, platform

TITLES = {"transformer_engine": "Transformer Engine", "apex": "apex", "torch": "torch"}
WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""apex's extension that adds a product to an fp32 matrix."""

_replaced: list[tuple[Any, str, Any]] = []
"""(module, name, megatron-core's own value) of what `choose` has replaced."""


def check_kernels(impl: OptimizerImpl) -> None:
    """Raise UserError if the implementation that was asked for cannot run here."""
    flag = f"--optimizer-impl {impl}"
    if impl in ("auto", "torch"):
        return
    if impl in optional.unusable:
        raise UserError(f"{flag}: {impl} cannot be used here: {optional.unusable[impl]}; leave the flag out")
    if importlib.util.find_spec(impl) is None:
        how = "docs/install.md#apex" if impl == "apex" else "pip install 'megatron-spec[te]'"
        raise UserError(f"{flag}: {TITLES[impl]} is not installed ({how}); leave the flag out")
    if not platform.machine().gpu:
        raise UserError(f"{flag} needs a GPU; leave the flag out")


def choose(impl: OptimizerImpl) -> None:
    """Make megatron-core's optimizers, and sums of weight gradients, use the kernels of an implementation.

    Args:
        impl: 'auto': what megatron-core chose when it was imported.
    """
    while _replaced:
        setattr(*_replaced.pop())
    for module, name, value in assignments(impl):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    products.add_by(_apex_products() if impl in ("auto", "apex") else None)


def assignments(impl: OptimizerImpl) -> Iterator[tuple[Any, str, Any]]:
    """(module, name, value) of everything in megatron-core that an implementation replaces."""
    if impl == "auto":
        return
    adam, applier, norm, scale, scale_tensor = _sources(impl)
    yield core, "Adam", adam
    yield core, "USING_PYTORCH_OPTIMIZER", impl == "torch"
    yield distrib_optimizer, "Adam", adam
    yield distrib_optimizer, "HAVE_APEX_OR_TE", impl != "torch"
    yield distrib_optimizer, "USING_TE_OPTIMIZER", impl == "transformer_engine"
    yield distrib_optimizer, "USING_APEX_OPTIMIZER", impl == "apex"
    for module in (clip_grads, mixed_precision):
        yield module, "multi_tensor_applier", applier
        yield module, "multi_tensor_scale_impl", scale
    yield clip_grads, "l2_norm_impl", norm
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # megatron-core 0.19
        yield clip_grads, "multi_tensor_scale_tensor_impl", scale_tensor


def _sources(impl: OptimizerImpl) -> tuple[Any, ...]:
    """Adam, applier, norm, scaling, and scaling by a tensor if there is one."""
    if impl == "transformer_engine":
        te = importlib.import_module("transformer_engine.pytorch.optimizers")
        by_tensor = getattr(te, "multi_tensor_scale_tensor", None)
        return te.FusedAdam, te.multi_tensor_applier, te.multi_tensor_l2norm, te.multi_tensor_scale, by_tensor
    if impl == "apex":
        amp_C, applied = importlib.import_module("amp_C"), importlib.import_module("apex.multi_tensor_apply")
        adam = importlib.import_module("apex.optimizers").FusedAdam
        return adam, applied.multi_tensor_applier, amp_C.multi_tensor_l2norm, amp_C.multi_tensor_scale, None
    local = (utils.local_multi_tensor_applier, utils.local_multi_tensor_l2_norm, utils.local_multi_tensor_scale)
    return torch.optim.AdamW, *local, None


def _apex_products() -> Any:
    """apex's extension for weight gradients; None without it."""
    try:
        return importlib.import_module(WEIGHT_GRADIENTS) if platform.machine().gpu else None
    except Exception:  # absent, or built for another torch or CUDA: torch has an operator for the same
        return None


def order() -> str:
    """What `auto` chooses from, with the reasons of those that are not there, for the log."""
    why = {name: _absent(name) for name in TITLES}
    names = [TITLES[name] + (f" ({why[name]})" if why[name] else "") for name in TITLES]
    return f"the first of {names[0]}, {names[1]} and {names[2]}"


def _absent(name: str) -> str | None:
    if name in optional.unusable:
        return f"not loaded: {optional.unusable[name]}" if name == optional.ENGINE else optional.unusable[name]
    return None if importlib.util.find_spec(name) is not None else "not installed"


def described(paths: Paths = NO_PATHS) -> str:
    """Whose kernels run, for the log.

    Args:
        paths: the fast paths of the draft.
    """
    adam, norm = (_title(x.__module__) for x in (core.Adam, clip_grads.l2_norm_impl))
    if paths.on("optimizer_pass"):
        adam += " in the first step, in one pass (optimizer_pass) later"
    return f"Adam of {adam}, gradient norm of {norm}, weight gradients of {products.adder()}"


def _title(module: str) -> str:
    if module.startswith("transformer_engine"):
        return TITLES["transformer_engine"]
    return TITLES["apex"] if module.startswith(("amp_C", "apex")) else TITLES["torch"]
