"""Matrix products accumulated into an existing matrix of wider dtype: weight gradients.

megatron-core's data-parallel wrapper gives every parameter an fp32 `main_grad`. Accumulating products directly into it
saves the intermediate gradient and the pass that adds it (megatron-core's gradient accumulation fusion).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b, accumulated in fp32 when the target is fp32 (2-D, rows of the target may be strided)."""
    if target.dtype == a.dtype:
        target.addmm_(a, b)
    elif target.is_cuda and target.dtype == torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(target, a, b, torch.float32, out=target)
    else:
        target += a @ b


class GradientSums:
    """Destinations of the weight gradients of one backward pass: `main_grad` if present, else new fp32 tensors."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The matrix to accumulate into."""
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            return main_grad  # type: ignore[no-any-return]
        if id(parameter) not in self._own:
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self._own[id(parameter)] = torch.zeros_like(parameter, dtype=wide)
        return self._own[id(parameter)]

    def result(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient to return to autograd; None when it is already in `main_grad`."""
        own = self._own.pop(id(parameter), None)
        return None if own is None else own.to(parameter.dtype)
