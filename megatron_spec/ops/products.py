"""Matrix products accumulated into an existing matrix of wider dtype: weight gradients.

megatron-core's data-parallel wrapper gives every parameter an fp32 `main_grad`. Accumulating products directly into it
saves the intermediate gradient and the pass that adds it (megatron-core's gradient accumulation fusion).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_apex: Any = None


def add_by(module: Any) -> None:
    """Choose who adds products to fp32 matrices: apex's `fused_weight_gradient_mlp_cuda`, or torch (None)."""
    global _apex
    _apex = module


def adder() -> str:
    """Who does."""
    return "torch" if _apex is None else "apex"


def _suits_apex(target: Tensor, a: Tensor, b: Tensor) -> bool:
    half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    whole = all(x.is_contiguous() for x in (target, a.t(), b))
    return half and whole and target.dtype == torch.float32


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b, accumulated in fp32 when the target is fp32 (2-D, rows of the target may be strided)."""
    if target.dtype == a.dtype:
        target.addmm_(a, b)
    elif _apex is not None and _suits_apex(target, a, b):
        _apex.wgrad_gemm_accum_fp32(b, a.t(), target)
    elif target.is_cuda and target.dtype == torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(target, a, b, torch.float32, out=target)
    else:
        target += a @ b


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 (fp64 for fp64), with sums of the same precision."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and wide != a.dtype and hasattr(torch.ops.aten.mm, "dtype"):
        found: Tensor = torch.ops.aten.mm.dtype(a, b, wide)
        return found
    total = a.new_zeros(len(a), b.shape[1], dtype=wide)
    add_product(total, a, b)
    return total


class GradientSums:
    """Destinations of the weight gradients of one backward pass: `main_grad` if present, else new fp32 tensors."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The matrix to accumulate into."""
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None and parameter.requires_grad:  # not of one that was frozen since
            return main_grad  # type: ignore[no-any-return]
        if id(parameter) not in self._own:
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self._own[id(parameter)] = torch.zeros_like(parameter, dtype=wide)
        return self._own[id(parameter)]

    def result(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient to return to autograd; None when it is already in `main_grad`."""
        own = self._own.pop(id(parameter), None)
        return None if own is None else own.to(parameter.dtype)
