"""Draft head, loss and gradient in one pass over chunks of rows.

The loss of a row needs its logits once, and so does the gradient: both are computed while the chunk's logits are
alive, so that no [rows, D] tensor outlives its chunk. All draft steps go through in one call, which lets the
gradient of the head be summed in a single buffer.

R rows, H draft hidden size, D this rank's shard of the draft vocabulary, T draft steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops.products import GradientSums, add_product

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 536 << 20}
"""Size of one chunk's logits: the cache on a CPU, a matmul large enough on a GPU."""


class RowResult(Protocol):
    """What a row loss returns (losses.vocab_parallel.RowLosses)."""

    loss_R: Tensor
    overlap_R: Tensor
    argmax_R: Tensor
    grad_RD: Tensor


RowLoss = Callable[[Tensor, Tensor], RowResult]
"""(draft logits [R, D] in fp32, which it may overwrite; teacher rows [R]) -> losses and gradient of the rows."""


RowLossInPlace = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(draft logits [R, D] in the compute dtype, replaced by the gradient of weight * loss; teacher rows [R]; weight [R]
fp32) -> loss, overlap, argmax of the rows."""


@dataclass
class StepRows:
    """The supervised rows of one draft step.

    Attributes:
        teacher_R: row of the teacher each one is compared with.
        weight_R: factor of the row's loss in the total, fp32 (0 leaves the row to the metrics alone).
        target_R: draft id that counts as correct; -1 where none can.
    """

    teacher_R: Tensor
    weight_R: Tensor
    target_R: Tensor


class _FusedHead(torch.autograd.Function):
    """forward -> (weighted total, [T, 3] of loss sum, correct, overlap sum); gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any, row_loss: RowLoss, in_place: RowLossInPlace | None, steps: list[StepRows], weight_DH: Tensor,
        *hidden_RH: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if weight_DH.dtype == torch.float64 else torch.float32
        train = any(ctx.needs_input_grad)
        grad_weight = torch.zeros_like(weight_DH, dtype=wide) if train and ctx.needs_input_grad[3] else None
        grads = [torch.empty_like(h) for h in hidden_RH] if train else []
        total = torch.zeros((), dtype=wide, device=weight_DH.device)
        stats = torch.zeros(len(steps), 3, dtype=wide, device=weight_DH.device)
        width = weight_DH.element_size() if in_place is not None else 4
        rows = max(1, CHUNK_BYTES.get(weight_DH.device.type, 64 << 20) // (weight_DH.shape[0] * width))
        for k, (step, hidden) in enumerate(zip(steps, hidden_RH, strict=True)):
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                x, scale = hidden[part], step.weight_R[part].to(wide)
                grad_logits = x @ weight_DH.t()
                if in_place is not None:
                    loss, overlap, argmax = in_place(grad_logits, step.teacher_R[part], scale)
                else:
                    result = row_loss(grad_logits.to(wide), step.teacher_R[part])
                    loss, overlap, argmax = result.loss_R, result.overlap_R, result.argmax_R
                    grad_logits = result.grad_RD.mul_(scale[:, None]).to(x.dtype)
                # where a weight is 0 the loss may be infinite (a label outside): 0, not NaN
                loss = torch.where(scale > 0, loss, 0)
                total += (loss * scale).sum()
                correct = (argmax == step.target_R[part]).sum()
                stats[k] += torch.stack([(loss * (scale > 0)).sum(), correct, overlap.sum()])
                if train:
                    torch.mm(grad_logits, weight_DH, out=grads[k][part])
                    if grad_weight is not None:
                        add_product(grad_weight, grad_logits.t(), x)
        ctx.save_for_backward(grad_weight, *grads)
        ctx.weight = weight_DH
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, *grads = ctx.saved_tensors
        told = None
        if grad_weight is not None:
            sums = GradientSums()
            sums.of(ctx.weight).addcmul_(grad_weight, grad_total)
            told = sums.result(ctx.weight)
        # in place on a GPU, where these are large; elsewhere a second backward through the same graph stays possible
        return None, None, None, told, *(g.mul_(grad_total) if g.is_cuda else g * grad_total.to(g.dtype) for g in grads)


def fused_head(
    hidden_RH: list[Tensor], weight_DH: Tensor, steps: list[StepRows], row_loss: RowLoss,
    in_place: RowLossInPlace | None = None,
) -> tuple[Tensor, Tensor]:
    """Head, loss and metrics of the supervised rows of all draft steps.

    Args:
        hidden_RH: normed rows of each step, complete on every tensor parallel rank. Their gradient is that of this
            rank's vocabulary shard alone: the caller brings them in through a region whose backward sums over ranks.
        weight_DH: this rank's rows of the draft head.
        in_place: used instead of `row_loss` when given.

    Returns:
        (total, stats [T, 3]): the weighted loss sum with gradient, and per step the loss sum over rows of weight > 0,
        the number of correct rows and the overlap sum; fp32, equal on every tensor parallel rank.
    """
    out: tuple[Tensor, Tensor] = _FusedHead.apply(row_loss, in_place, steps, weight_DH, *hidden_RH)  # type: ignore[no-untyped-call]
    return out
