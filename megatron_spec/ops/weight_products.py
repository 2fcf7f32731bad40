"""Products with one weight, repeated at every step of a draft's unroll, forward and backward.

In bf16, or with both operands rounded to real fp8 (E4M3, one scale per input row and weight channel,
`ops/kernels/fp8.py`): the weight is rounded once per micro-batch along each of its dimensions. Weight gradients stay
bf16.

R rows, H inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightProducts:
    """Products with one weight [O, H].

    Args:
        fp8: round to fp8 (compute capability 9.0, bf16 weights, O and H multiples of 16).
    """

    def __init__(self, weight_OH: Tensor, fp8: bool = False) -> None:
        self.weight, self.fp8 = weight_OH, fp8
        if fp8:
            from megatron_spec.ops.kernels.fp8 import quantize

            self._by_output, self._by_input = quantize(weight_OH), quantize(weight_OH.t())

    def forward(self, x_RH: Tensor, out: Tensor | None = None) -> Tensor:
        """x W^T [R, O]."""
        if not self.fp8:
            return torch.mm(x_RH, self.weight.t(), out=out)
        from megatron_spec.ops.kernels import fp8

        return fp8.product(fp8.quantize(x_RH), self._by_output, x_RH.dtype, out=out)

    def backward(self, d_RO: Tensor, out: Tensor | None = None) -> Tensor:
        """d W [R, H], the gradient of the input."""
        if not self.fp8:
            return torch.mm(d_RO, self.weight, out=out)
        from megatron_spec.ops.kernels import fp8

        # Gradients need full-precision sums: fast accumulation keeps only 14 bits of a partial sum.
        return fp8.product(fp8.quantize(d_RO), self._by_input, d_RO.dtype, out=out, fast=False)
