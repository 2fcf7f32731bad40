"""Matrix products whose result is added to an existing, wider matrix: weight gradients.

megatron-core's data parallel wrapper gives every parameter an fp32 `main_grad`. Summing products straight into it
saves the intermediate gradient and the pass that adds it (what megatron-core calls gradient accumulation fusion).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b, summed in fp32 when the target is fp32 (2-D, rows of the target may be strided)."""
    if target.dtype == a.dtype:
        target.addmm_(a, b)
    elif target.is_cuda and target.dtype == torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(target, a, b, torch.float32, out=target)
    else:
        target += a @ b


class GradientSums:
    """Where the weight gradients of one backward pass go: `main_grad` where there is one, else new fp32 tensors."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The matrix to add to."""
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            return main_grad  # type: ignore[no-any-return]
        if id(parameter) not in self._own:
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self._own[id(parameter)] = torch.zeros_like(parameter, dtype=wide)
        return self._own[id(parameter)]

    def result(self, parameter: nn.Parameter) -> Tensor | None:
        """What autograd is told: nothing when the gradient is in `main_grad` already."""
        own = self._own.pop(id(parameter), None)
        return None if own is None else own.to(parameter.dtype)
