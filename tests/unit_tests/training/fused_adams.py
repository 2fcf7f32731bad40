"""Stand-ins for the optimizers of Transformer Engine and apex: the interface that megatron-core uses, on the CPU.

As the real ones they count steps per parameter group, need `bias_correction` in every group, and know exp_avg and
exp_avg_sq alone. Transformer Engine's takes a state's tensors by name and refuses others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core import utils

from megatron_spec.training import kernels, optimizer


class FusedAdam(torch.optim.Optimizer):
    """apex's: Adam with a fused update; torch's loading of states."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, capturable: bool = False,
    ) -> None:  # fmt: skip
        found = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, found)
        assert adam_w_mode and not capturable

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            assert isinstance(group["step"], int)
            (first, second), step = group["betas"], group["step"]
            corrections = (1 - first**step, 1 - second**step) if group["bias_correction"] else (1.0, 1.0)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p).float() for _ in range(2))
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(first).add_(p.grad, alpha=1 - first)
                v.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


class FusedSGD(torch.optim.SGD):
    """Imported with FusedAdam."""


class StrictFusedAdam(FusedAdam):
    """Transformer Engine's: states by name."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As that of Transformer Engine."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in state:
                {"exp_avg": 0, "exp_avg_sq": 0, "master_param": 0}[name]
                state[name] = state[name].float()


StrictFusedAdam.__name__ = "FusedAdam"
StrictFusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
FusedAdam.__module__ = "apex.optimizers.fused_adam"


def l2norm(*args: Any) -> Any:
    """The norm of either."""
    return optimizer._norm(*args)


def scale(*args: Any) -> Any:
    """The scaling of either."""
    return utils.local_multi_tensor_scale(*args)


def wgrad_gemm_accum_fp32(x_RH: torch.Tensor, d_RO: torch.Tensor, target_OH: torch.Tensor) -> None:
    """apex's sum of weight gradients."""
    assert all(t.is_contiguous() for t in (x_RH, d_RO, target_OH))
    target_OH += d_RO.float().t() @ x_RH.float()


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


MODULES = {
    "transformer_engine.pytorch.optimizers": _module(
        "transformer_engine.pytorch.optimizers", FusedAdam=StrictFusedAdam, FusedSGD=FusedSGD,
        multi_tensor_applier=utils.local_multi_tensor_applier, multi_tensor_l2norm=l2norm, multi_tensor_scale=scale,
        multi_tensor_scale_tensor=scale,
    ),
    "amp_C": _module("amp_C", multi_tensor_l2norm=l2norm, multi_tensor_scale=scale),
    "apex": _module("apex", __path__=[]),
    "apex.optimizers": _module("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=FusedSGD),
    "apex.multi_tensor_apply": _module(
        "apex.multi_tensor_apply", multi_tensor_applier=utils.local_multi_tensor_applier
    ),
    "fused_weight_gradient_mlp_cuda": _module(
        "fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32
    ),
}  # fmt: skip


@contextmanager
def restored() -> Iterator[pytest.MonkeyPatch]:
    """A block after which megatron-core and torch's sums of products are as before."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, _ in kernels.assignments("torch"):
            patch.setattr(module, name, getattr(module, name))
        yield patch
    kernels.products.add_by(None)


@contextmanager
def installed() -> Iterator[None]:
    """A block in which both packages are there, as stand-ins."""
    with restored() as patch:
        for name, module in MODULES.items():
            patch.setitem(sys.modules, name, module)
        yield
