"""LM head, loss and gradient of a draft in one pass over chunks of rows.

Loss and gradient of a row both read its logits once: both are computed while the chunk's logits are in memory, so no
[rows, D] tensor outlives its chunk. One call takes all draft steps, so the LM head's gradient accumulates in a single
buffer.

R rows, H draft hidden size, D this rank's shard of the draft vocabulary, T draft steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops.fp8 import Fp8Matrix
from megatron_spec.ops.products import GradientSums
from megatron_spec.ops.weight_products import WeightProducts, weight_gradient

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1050 << 20}
"""Size of one chunk's logits: fits the cache on a CPU, makes an efficient matmul on a GPU."""


class RowResult(Protocol):
    """Result of a row loss (losses.vocab_parallel.RowLosses)."""

    loss_R: Tensor
    overlap_R: Tensor
    argmax_R: Tensor
    grad_RD: Tensor


RowLoss = Callable[[Tensor, Tensor], RowResult]
"""(draft logits [R, D] in fp32, may be overwritten; teacher rows [R]) -> losses and gradient of the rows."""


RowLossInPlace = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(draft logits [R, D] in the compute dtype, replaced by the gradient of weight * loss; teacher rows [R]; weight [R]
fp32, may be replaced; where the head is in fp8, an output for the gradient in fp8; `known`, if the product found it:
what the operator `largest` returns) -> loss, overlap, argmax of the rows."""


Weigh = Callable[..., Tensor]
"""(draft logits [R, D] of a chunk in the compute dtype; teacher rows [R]; the chunk's place among all rows, in their
order; `known` as above) -> factors [R] of the rows' weights."""


Scale = Callable[[Tensor, Tensor], Tensor]
"""(x, scalar on the device) -> x * scalar; x may be overwritten."""


@dataclass
class StepRows:
    """The supervised rows of one draft step.

    Attributes:
        teacher_R: teacher row that each row is compared with.
        weight_R: fp32 weight of the row's loss in the total (rows of weight 0 enter only the metrics).
        target_R: draft id that counts as correct; -1 for none.
    """

    teacher_R: Tensor
    weight_R: Tensor
    target_R: Tensor


@dataclass(frozen=True, eq=False)
class _Given:
    """The arguments of `fused_head` that have no gradient."""

    steps: list[StepRows]
    row_loss: RowLoss
    in_place: RowLossInPlace | None
    scale_: Scale | None
    chunks: list[slice] | None
    fp8: Any
    order_N: Tensor | None
    weigh: Weigh | None
    epilogue: tuple[Any, float] | None


class _FusedHead(torch.autograd.Function):
    """forward -> (weighted total, [T, 3] of loss sum, correct, overlap sum); gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, given: _Given, weight_DH: Tensor, *hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        """See `fused_head`."""
        in_place, fp8, order_N, epilogue = given.in_place, given.fp8, given.order_N, given.epilogue
        wide = torch.float64 if weight_DH.dtype == torch.float64 else torch.float32
        train = any(ctx.needs_input_grad)
        counts, products = [len(h) for h in hidden_RH], WeightProducts(weight_DH, fp8)
        x_NH, teacher, weight, target = (_at(x, order_N) for x in (_joined(list(hidden_RH)), *_facts(given.steps)))
        places_N = None if order_N is None else _places(order_N)
        gradient = weight_gradient(x_NH, weight_DH, fp8) if train and ctx.needs_input_grad[1] else None
        grad_NH = torch.empty_like(x_NH) if train else None
        weight = weight.to(wide)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        chunks = given.chunks
        if chunks is None:
            chunks = row_chunks(len(x_NH), chunk_rows(weight_DH, in_place is not None))
        for part in chunks:
            if epilogue is None:
                logits, known = products.forward(x_NH[part]), {}
            else:
                logits, largest = products.forward_largest(x_NH[part], *epilogue)
                known = {"known": largest}
            grad: Tensor | Fp8Matrix = logits
            if given.weigh is not None:
                weight[part] *= given.weigh(logits, teacher[part], part, **known)
            if in_place is not None:
                rows = (logits, teacher[part], weight[part])
                if train and fp8 is not None:
                    grad = Fp8Matrix.empty(len(logits), len(weight_DH), logits.device)
                    found.append(in_place(*rows, grad))
                else:
                    found.append(in_place(*rows, **known))
            else:
                result = given.row_loss(logits.to(wide), teacher[part])
                found.append((result.loss_R, result.overlap_R, result.argmax_R))
                grad = result.grad_RD.mul_(weight[part, None]).to(logits.dtype)
            if grad_NH is not None:
                products.backward(grad, out=grad_NH[part])
            if gradient is not None:
                gradient.add(grad)
        total, stats = _sums(found, weight, target, counts, places_N)
        ctx.save_for_backward(
            None if gradient is None else gradient.result(), None if grad_NH is None else _at(grad_NH, places_N)
        )
        ctx.weight, ctx.counts, ctx.scale_ = weight_DH, counts, given.scale_
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients computed in forward, times the gradient of the total."""
        grad_weight, grad_NH = ctx.saved_tensors
        d_weight = None
        if grad_weight is not None:
            sums = GradientSums()
            sums.of(ctx.weight).addcmul_(grad_weight, grad_total)
            d_weight = sums.result(ctx.weight)
        if ctx.scale_ is not None:
            scaled = ctx.scale_(grad_NH, grad_total)
        else:
            scaled = grad_NH * grad_total.to(grad_NH.dtype)
        return None, d_weight, *scaled.split(ctx.counts)


def chunk_rows(weight_DH: Tensor, in_place: bool = False, columns: int | None = None) -> int:
    """Rows per chunk of logits; in large chunks a multiple of 128, a tile of the products.

    Args:
        columns: of the widest shard: ranks exchange sums of a chunk's rows, so all need equal chunks.
    """
    row = (columns or weight_DH.shape[0]) * (weight_DH.element_size() if in_place else 4)
    rows = max(1, CHUNK_BYTES.get(weight_DH.device.type, 64 << 20) // row)
    return rows - rows % 128 if rows >= 1024 else rows


def row_chunks(count: int, size: int) -> list[slice]:
    """Chunks of `size` rows; the last one may be smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def whole_chunks(counts_P: Tensor, size: int) -> list[slice]:
    """Chunks of rows that come in P groups: whole groups, of at most `size` rows together unless one group has more.

    A chunk ends at a multiple of 16 rows if one of the last groups that fit does: products in fp8 write faster there.

    Args:
        counts_P: int64 rows of each group, on the host.
    """
    ends, chunks, start = counts_P.cumsum(0), [], 0
    total = int(ends[-1]) if len(ends) else 0
    while start < total:
        fitting = ends[int(torch.searchsorted(ends, start, right=True)) :]
        fitting = fitting[: max(1, int(torch.searchsorted(fitting, start + size, right=True)))]
        end = int(fitting[-1])
        even = fitting[-64:][fitting[-64:] % 16 == 0]
        if end < total and len(even):
            end = int(even[-1])
        chunks.append(slice(start, end))
        start = end
    return chunks


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the rows of all parts, without a copy if they are adjacent in one buffer."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or (part.numel() and part.data_ptr() != end):
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    if first.untyped_storage().nbytes() < end - first.untyped_storage().data_ptr():
        return torch.cat(parts)  # adjacent by chance, in different buffers
    return first.as_strided((sum(map(len, parts)), first.shape[1]), (first.shape[1], 1))


def _facts(steps: list[StepRows]) -> tuple[Tensor, Tensor, Tensor]:
    """[N] teacher row, weight and target of the rows of all steps."""
    teacher, weight, target = zip(*((s.teacher_R, s.weight_R, s.target_R) for s in steps), strict=True)
    return torch.cat(teacher), torch.cat(weight), torch.cat(target)


def _places(order_N: Tensor) -> Tensor:
    """Where each row is in that order: to restore rows by index_select is three times as fast as by index_copy_."""
    places_N = torch.empty_like(order_N)
    places_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return places_N


def _at(x_NX: Tensor, rows_N: Tensor | None) -> Tensor:
    """Its rows in another order, if there is one."""
    return x_NX if rows_N is None else x_NX.index_select(0, rows_N)


def _sums(
    found: list[tuple[Tensor, Tensor, Tensor]], weight_N: Tensor, target_N: Tensor, counts: list[int],
    places_N: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weighted total, [T, 3]) from (loss, overlap, argmax) of the chunks."""
    if not found:
        return weight_N.new_zeros(()), weight_N.new_zeros(len(counts), 3)
    loss, overlap, argmax = (torch.cat(x) if len(found) > 1 else x[0] for x in zip(*found, strict=True))
    # at weight 0 the loss may be infinite (label outside the vocabulary): 0, not NaN
    loss = torch.where(weight_N > 0, loss, 0)
    columns = _at(torch.stack([loss, (argmax == target_N).to(loss.dtype), overlap], 1), places_N)
    return (loss * weight_N).sum(), torch.stack([part.sum(0) for part in columns.split(counts)])


def fused_head(
    hidden_RH: list[Tensor],
    weight_DH: Tensor,
    steps: list[StepRows],
    row_loss: RowLoss,
    in_place: RowLossInPlace | None = None,
    scale_: Scale | None = None,
    chunks: list[slice] | None = None,
    fp8: Any = None,
    order_N: Tensor | None = None,
    weigh: Weigh | None = None,
    epilogue: tuple[Any, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """LM head, loss and metrics of the supervised rows of all draft steps.

    Args:
        hidden_RH: normed rows of each step, whole on every TP rank. Their gradient covers only this rank's vocabulary
            shard: the caller passes them through a region whose backward sums over ranks.
        weight_DH: this rank's rows of the draft's LM head.
        in_place: used instead of `row_loss` when given.
        scale_: multiplies the (large) gradient in place by a scalar that is nearly always 1.
        chunks: of the rows of all steps, in order (default: by the size of this rank's shard).
        order_N: int64, the order in which the rows of all steps are taken (default: step by step).
        weigh: called for every chunk before its loss; multiplies the weights.
        fp8: operators (`ops.backend.load`), to compute logits and both gradients in fp8 (`ops/weight_products.py`);
            needs `in_place`.
        epilogue: (operators, temperature of the loss), to find each row's largest logit and log-sum-exp in the product;
            needs `in_place`.

    Returns:
        (total, stats [T, 3]): the weighted loss sum with gradient, and per step the loss sum over rows of weight > 0,
        the number of correct rows and the overlap sum; fp32, equal on every TP rank.
    """
    assert in_place is not None or fp8 is epilogue is None
    given = _Given(steps, row_loss, in_place, scale_, chunks, fp8, order_N, weigh, epilogue)
    out: tuple[Tensor, Tensor] = _FusedHead.apply(given, weight_DH, *hidden_RH)  # type: ignore[no-untyped-call]
    return out
