"""Row losses and their gradients on one shard of the draft vocabulary; logits are never gathered.

TP ranks exchange a few numbers per row: maxima, sums of exponentials, partial sums. `reference.py` has the same losses
in one line each.

R rows, D this rank's shard of the draft vocabulary, U teacher rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.config import LossKind, UserError
from megatron_spec.losses.reference import HYBRID_ETA
from megatron_spec.ops.fp8 import Fp8Matrix


@dataclass
class Teacher:
    """The base's distribution at U rows, computed once per micro-batch and indexed by every draft step.

    Attributes:
        logits_UD: this rank's shard of the base logits restricted to the draft vocabulary, in the compute dtype.
        lse_U: log-sum-exp of logits / temperature over the whole draft vocabulary, fp32.
        argmax_U: target id of the base's argmax over its full vocabulary.
        label_U: draft id of that argmax, or of the best draft token if it is outside the draft vocabulary.
        in_vocab_U: bool, the argmax is in the draft vocabulary.
        first: draft id of this rank's first column; the last rank's shard may be narrower than the others.
        columns: of the widest shard; 0: of this one.
    """

    logits_UD: Tensor
    lse_U: Tensor
    argmax_U: Tensor
    label_U: Tensor
    in_vocab_U: Tensor
    first: int = 0
    columns: int = 0


OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss in the form of `reference.py`: (log p of the teacher [R, D], log q of the draft [R, D]) -> [R], over the whole
draft vocabulary and differentiable in the second. Rows come in chunks, so each has to be computed from itself alone."""


@dataclass
class RowLosses:
    """Losses of R rows; equal on every TP rank, except the gradient.

    Attributes:
        loss_R: loss of each row.
        overlap_R: sum_v min(p, q).
        argmax_R: draft id with the largest draft logit.
        grad_RD: derivative of loss_R with respect to this rank's draft logits.
    """

    loss_R: Tensor
    overlap_R: Tensor
    argmax_R: Tensor
    grad_RD: Tensor


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the group, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def _gather_ranks(group: dist.ProcessGroup, *rows_R: Tensor) -> Tensor:
    """[TP, n, R]: n row vectors of every rank, as float64, which represents token ids and float32 exactly."""
    mine = torch.stack([x.double() for x in rows_R])
    everyone = mine.new_empty((group.size(), *mine.shape))
    dist.all_gather(list(everyone), mine, group=group)
    return everyone


def argmax_over_ranks(top_R: Tensor, index_R: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Index of the largest value over ranks, from each rank's maximum and its global index; first rank wins ties."""
    if group is None or group.size() == 1:
        return index_R
    everyone = _gather_ranks(group, top_R, index_R)
    return everyone[:, 1].gather(0, everyone[:, 0].argmax(0)[None])[0].long()


def largest_over_ranks(
    group: dist.ProcessGroup, top_R: Tensor, index_R: Tensor, other_R: Tensor, other_index_R: Tensor, lse_R: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The largest `top_R` over ranks and its index, the same of `other_R`, and the log-sum-exp of `lse_R`, in one
    exchange; values are fp64, and the first rank wins ties."""
    everyone = _gather_ranks(group, top_R, index_R, other_R, other_index_R, lse_R)
    (top, index), (other, other_index) = (
        (everyone[:, i].amax(0), everyone[:, i + 1].gather(0, everyone[:, i].argmax(0)[None])[0].long()) for i in (0, 2)
    )
    return top, index, other, other_index, everyone[:, 4].logsumexp(0)


def argmax_and_lse(x_RD: Tensor, group: dist.ProcessGroup | None, first: int) -> tuple[Tensor, Tensor]:
    """(index of the largest value [R], log-sum-exp [R]) over the full vocabulary.

    Args:
        first: index of this rank's first column.
    """
    top_R, index_R = x_RD.max(-1)
    lse_R = (x_RD - top_R[:, None]).exp_().sum(-1).log_().add_(top_R)
    if group is None or group.size() == 1:
        return index_R, lse_R
    index_R, lse_R = _agree(group, top_R, lse_R, index_R + first)
    return index_R, lse_R.to(x_RD.dtype)


def _agree(group: dist.ProcessGroup, top_R: Tensor, lse_R: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the largest value [R], log-sum-exp [R] fp64) over all ranks, from the values of each rank's shard."""
    everyone = _gather_ranks(group, top_R, index_R, lse_R)
    index_R = everyone[:, 1].gather(0, everyone[:, 0].argmax(0)[None])[0].long()
    return index_R, everyone[:, 2].logsumexp(0)


def pick(x_RD: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(column in this shard [R, 1], whether this shard has it [R], value of that column or 0 [R])."""
    mine = (column_R >= 0) & (column_R < x_RD.shape[-1])
    inside = column_R.clamp(0, x_RD.shape[-1] - 1)[:, None]
    return inside, mine, x_RD.gather(-1, inside)[:, 0] * mine


def log_probabilities(
    draft_RD: Tensor, teacher: Teacher, rows_R: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(argmax of the draft [R], log q of the draft [R, D], log p of the teacher [R, D]) of this rank's shard.

    Args:
        draft_RD: draft logits; the buffer becomes log q.
    """
    u_RD = draft_RD.div_(temperature) if temperature != 1 else draft_RD
    argmax_R, lse_R = argmax_and_lse(u_RD, group, teacher.first)
    logq_RD = u_RD.sub_(lse_R[:, None])
    logp_RD = teacher.logits_UD[rows_R].to(u_RD.dtype)
    if temperature != 1:
        logp_RD.div_(temperature)
    return argmax_R, logq_RD, logp_RD.sub_(teacher.lse_U[rows_R, None])


def row_losses(
    draft_RD: Tensor,
    teacher: Teacher,
    rows_R: Tensor,
    kind: LossKind | OwnLoss,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> RowLosses:
    """Losses of R rows against rows `rows_R` of the teacher.

    Args:
        kind: a loss of this file, or one of the caller's, whose rows are gathered over ranks.
        draft_RD: fp32 (or fp64) draft logits of this rank's shard; the buffer is overwritten.
    """
    argmax_R, logq_RD, logp_RD = log_probabilities(draft_RD, teacher, rows_R, temperature, group)
    p_RD, q_RD = logp_RD.exp(), logq_RD.exp()
    overlap_R = p_RD.minimum(q_RD).sum(-1)
    column_R = teacher.label_U[rows_R] - teacher.first
    if callable(kind):
        loss_R, grad_RD = _own_loss(kind, logp_RD, logq_RD, q_RD, teacher, group)
        reduce_together(group, overlap_R)
    else:
        loss_R, grad_RD = _KINDS[kind](logp_RD, logq_RD, p_RD, q_RD, overlap_R, column_R, group)
    if temperature != 1:
        grad_RD.div_(temperature)
    return RowLosses(loss_R, overlap_R, argmax_R, grad_RD)


def _own_loss(
    loss: OwnLoss, logp_RD: Tensor, logq_RD: Tensor, q_RD: Tensor, teacher: Teacher, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(loss [R], gradient [R, D] of this rank's logits). Raises UserError for a loss of another form."""
    logp, logq = (_whole(x, teacher, group) for x in (logp_RD, logq_RD))
    with torch.enable_grad():
        leaf = logq.detach().requires_grad_()
        loss_R = loss(logp, leaf)
        if not isinstance(loss_R, Tensor) or loss_R.shape != leaf.shape[:1] or not loss_R.requires_grad:
            found = f"shape {list(loss_R.shape)}" if isinstance(loss_R, Tensor) else f"a {type(loss_R).__name__}"
            raise UserError(
                f"the draft's own row_loss: found {found}, expected a tensor of shape [{len(leaf)}], one number for "
                "each row, differentiable in the draft's log-probabilities (the second argument)"
            )
        (grad_RV,) = torch.autograd.grad(loss_R.sum(), leaf)
    mine = grad_RV[:, teacher.first : teacher.first + q_RD.shape[-1]]
    return loss_R.detach(), mine - q_RD * grad_RV.sum(-1, keepdim=True)


def _whole(x_RD: Tensor, teacher: Teacher, group: dist.ProcessGroup | None) -> Tensor:
    """[R, draft vocabulary] the columns of all ranks."""
    if group is None or group.size() == 1:
        return x_RD
    end = torch.tensor(teacher.first + x_RD.shape[-1], device=x_RD.device)
    dist.all_reduce(end, op=dist.ReduceOp.MAX, group=group)
    mine = F.pad(x_RD, (0, teacher.columns - x_RD.shape[-1]))
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, -1)[:, : int(end)]


Largest = tuple[Tensor, Tensor, Tensor]
"""(largest value, log-sum-exp, index of the largest value) of logits / temperature, each [R] (operator `largest`)."""


InPlace = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""See `ops.head.RowLossInPlace`."""


def kernel_row_loss(
    teacher: Teacher,
    kind: LossKind,
    temperature: float,
    group: dist.ProcessGroup | None,
    kernels: Any,
    weights: tuple[float, float] = (1.0, 0.0),
) -> InPlace:
    """`row_losses` or `block.ce_l1_rows` as one kernel that overwrites logits with weighted gradients.

    Args:
        kind: one of `planning.draft_paths.KERNEL_LOSSES`.
        kernels: operators (`ops.backend.load`).
        weights: of cross-entropy and sum |q - p|, for ce_l1.
    """
    if kind not in ("soft_ce", "kl"):
        return _mixed_row_loss(
            teacher, {"hard_ce": (1.0, 0.0), "tv": (0.0, 0.5)}.get(kind, weights), temperature, group, kernels
        )

    def in_place(
        logits_RD: Tensor, rows_R: Tensor, weight_R: Tensor, rounded: Fp8Matrix | None = None,
        known: Largest | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Loss, overlap and best column; the gradient replaces the logits, and is rounded on request."""
        given = (logits_RD, teacher.logits_UD, teacher.lse_U, rows_R, weight_R)
        if known is None and (group is None or group.size() == 1):
            return kernels.soft_rows(*given, temperature, kind == "kl", rounded)
        assert rounded is None, "no rank has a whole row to round"
        lse_R, best_R = kernel_largest(logits_RD, teacher.first, temperature, group, kernels, known)
        loss_R, overlap_R = kernels.soft_shard(*given, lse_R, temperature, kind == "kl")
        reduce_together(group, loss_R, overlap_R)
        return loss_R, overlap_R, best_R

    return in_place


def _mixed_row_loss(
    teacher: Teacher, weights: tuple[float, float], temperature: float, group: dist.ProcessGroup | None, kernels: Any
) -> InPlace:
    """a * cross-entropy to the label + b * sum |q - p|, (a, b) = `weights`."""
    given, column_U = (teacher.logits_UD, teacher.lse_U), teacher.label_U - teacher.first

    def in_place(
        logits_RD: Tensor, rows_R: Tensor, weight_R: Tensor, known: Largest | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, overlap and best column; the gradient replaces the logits."""
        if known is None and (group is None or group.size() == 1):
            return kernels.mixed_rows(logits_RD, *given, rows_R, column_U, weight_R, temperature, weights)
        lse_R, best_R = kernel_largest(logits_RD, teacher.first, temperature, group, kernels, known)
        label_R, overlap_R, mass_R = kernels.mixed_sums(logits_RD, *given, rows_R, column_U, lse_R, temperature)
        reduce_together(group, label_R, overlap_R, mass_R)
        kernels.mixed_gradient(logits_RD, *given, rows_R, column_U, weight_R, lse_R, mass_R, temperature, weights)
        return 2 * weights[1] * (1 - overlap_R) - weights[0] * label_R, overlap_R, best_R

    return in_place


def kernel_largest(
    logits_RD: Tensor,
    first: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    kernels: Any,
    known: Largest | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-sum-exp of logits / temperature, index of the largest logit) of R rows over all ranks.

    Args:
        first: index of this rank's first column.
        known: of this rank's columns, if the product found it.
    """
    top_R, lse_R, index_R = known or kernels.largest(logits_RD, temperature)
    if group is None or group.size() == 1:
        return lse_R, index_R
    index_R, wide_R = _agree(group, top_R, lse_R, index_R + first)
    return wide_R.to(lse_R.dtype), index_R


# Each kind: (logp, logq, p, q, overlap summed over this shard, column of the label, group) -> (loss, gradient). It may
# overwrite its inputs, and must leave `overlap` summed over the group. A label on another rank has no column here.


def _soft_ce(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    loss = -torch.linalg.vecdot(p, logq)
    reduce_together(group, loss, overlap)
    return loss, q.sub_(p)


def _kl(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    loss = torch.linalg.vecdot(p, logp.sub_(logq))
    reduce_together(group, loss, overlap)
    return loss, q.sub_(p)


def _reverse_kl(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    ratio = logq.sub_(logp)
    loss = torch.linalg.vecdot(q, ratio)
    reduce_together(group, loss, overlap)
    return loss, q.mul_(ratio.sub_(loss[:, None]))


def _tv(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    below = (q < p).to(q.dtype)  # d min(p, q) / dq
    mass = torch.linalg.vecdot(q, below)
    reduce_together(group, mass, overlap)
    return 1 - overlap, q.mul_(mass[:, None] - below)


def _lk(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    # in log space: where draft and teacher differ widely, every min(p, q) underflows
    below = logq < logp
    lower = torch.minimum(logp, logq)
    _, log_overlap = argmax_and_lse(lower, group, 0)
    share = lower.sub_(log_overlap[:, None]).exp_().mul_(below)
    mass = share.sum(-1)
    reduce_together(group, mass, overlap)
    return -log_overlap, q.mul_(mass[:, None]).sub_(share)


def _lk_hybrid(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    below = (q < p).to(q.dtype)
    divergence, mass = torch.linalg.vecdot(p, logp.sub_(logq)), torch.linalg.vecdot(q, below)
    reduce_together(group, divergence, mass, overlap)
    w = (-HYBRID_ETA * overlap).exp_()
    loss = w * divergence + (1 - w) * (1 - overlap)
    flat = below.neg_().add_(mass[:, None]).mul_(q).mul_(1 - w[:, None])  # of the total variation
    return loss, q.sub_(p).mul_(w[:, None]).add_(flat)


def _hard_ce(
    logp: Tensor, logq: Tensor, p: Tensor, q: Tensor, overlap: Tensor, column: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    index, mine, value = pick(logq, column)
    loss = -value
    reduce_together(group, loss, overlap)
    return loss, q.scatter_add_(-1, index, -mine[:, None].to(q.dtype))


_KINDS = {"soft_ce": _soft_ce, "kl": _kl, "reverse_kl": _reverse_kl, "tv": _tv, "lk": _lk, "lk_hybrid": _lk_hybrid,
          "hard_ce": _hard_ce}  # fmt: skip


def reduce_together(group: dist.ProcessGroup | None, *sums_R: Tensor) -> None:
    """Sum several row vectors over the group in one all-reduce, in place."""
    if group is None or group.size() == 1:
        return
    together = all_reduce_sum(torch.stack(sums_R), group)
    for mine, total in zip(sums_R, together, strict=True):
        mine.copy_(total)
