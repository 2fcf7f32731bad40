"""Row selection with a cheap gradient.

N rows, R selected rows, H any width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _PickRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, rows_R: Tensor) -> Tensor:
        """See `pick_rows`."""
        ctx.save_for_backward(rows_R)
        ctx.total = x_NH.shape[0]
        return x_NH.index_select(0, rows_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
        """Scatter rows back to their positions, zero elsewhere."""
        (rows_R,) = ctx.saved_tensors
        return grad_RH.new_zeros(ctx.total, *grad_RH.shape[1:]).index_copy_(0, rows_R, grad_RH), None


def pick_rows(x_NH: Tensor, rows_R: Tensor) -> Tensor:
    """Rows `rows_R` (distinct) of x: [R, H].

    Because they are distinct, the gradient is a copy, not a sum: faster than that of `index_select`, and deterministic
    on a GPU.
    """
    out: Tensor = _PickRows.apply(x_NH, rows_R)  # type: ignore[no-untyped-call]
    return out
