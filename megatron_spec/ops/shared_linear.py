"""A replicated linear whose work is shared by the ranks that have all of its rows.

Tensor parallel ranks would compute the projection of the captures, on equal rows, as often as there are ranks. Here
each one multiplies its part of the rows, and its part of the weight gradient's, and they gather the results: no sum is
divided, so nothing is rounded more often. Results and gradients are complete on every rank.

R rows, C inputs, O outputs, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FEWEST_ROWS = 2048
"""Below, each rank computes all of them: the exchange would take longer."""


class _SharedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, weight_OC: Tensor, bias_O: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        """[R, O]."""
        ctx.save_for_backward(x_RC, weight_OC)
        ctx.group = group
        whole = x_RC.new_empty(len(x_RC), len(weight_OC))
        own = F.linear(x_RC.chunk(group.size())[group.rank()], weight_OC, bias_O)
        dist.all_gather_into_tensor(whole, own, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, from those of the output, which are equal on all ranks."""
        (x_RC, weight_OC), group = ctx.saved_tensors, ctx.group
        d_x = grad_RO @ weight_OC if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight_OC)
            own = grad_RO.chunk(group.size(), dim=1)[group.rank()].t() @ x_RC
            dist.all_gather_into_tensor(d_weight, own, group=group)
        return d_x, d_weight, grad_RO.sum(0) if ctx.needs_input_grad[2] else None, None


def pays(x: Tensor, outputs: int, group: dist.ProcessGroup) -> bool:
    """True if gradients are enabled and [..., C] has enough rows to share, evenly."""
    rows, ranks = x.shape[:-1].numel(), group.size()
    even = rows % ranks == 0 and outputs % ranks == 0
    return ranks > 1 and even and rows >= FEWEST_ROWS and torch.is_grad_enabled()


def shared_linear(x: Tensor, weight_OC: Tensor, bias_O: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """x W^T + b [..., O], where that `pays`; differentiable.

    Args:
        x: [..., C], equal on all ranks of the group, as is the gradient of the result.
        weight_OC: contiguous.
    """
    found: Tensor = _SharedLinear.apply(x.flatten(0, -2), weight_OC, bias_O, group)  # type: ignore[no-untyped-call]
    return found.unflatten(0, x.shape[:-1])
