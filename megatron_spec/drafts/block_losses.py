"""Losses of block drafts: LM head and loss of all supervised slots in one pass, step weights, DSpark's extra heads.

P blocks, T steps, R rows of a step, N rows of all steps, H hidden size, V / TP this rank's shard of the vocabulary,
r rank of the Markov head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.config import ObjectiveConfig
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.drafts.pace import Pace
from megatron_spec.losses import block
from megatron_spec.losses.vocab_parallel import (
    InPlace,
    OwnLoss,
    RowLosses,
    Teacher,
    kernel_row_loss,
    row_losses,
)
from megatron_spec.ops import backend
from megatron_spec.ops.head import StepRows, chunk_rows, fused_head, row_chunks
from megatron_spec.ops.products import add_product
from megatron_spec.ops.rows import pick_rows
from megatron_spec.planning.paths import NO_PATHS, Paths
from megatron_spec.runtime.platform import to_device


@dataclass
class BlockHead:
    """Inputs and weights of a block's heads. The logits of a row x are weight_VH x (+ low_weight_Vr l).

    Attributes:
        rows: per step [R, H], complete on every tensor parallel rank, gradients summed over ranks.
        weight_VH: this rank's rows of the base's LM head.
        low_Nr: l, the Markov head's latent vectors for the rows of all steps; complete, gradients summed likewise.
        low_weight_Vr: this rank's rows of the Markov head's output matrix.
        confidence_N: logits of the confidence head for the rows of all steps, equal on all ranks; None without one.
    """

    rows: list[Tensor]
    weight_VH: Tensor
    low_Nr: Tensor | None = None
    low_weight_Vr: Tensor | None = None
    confidence_N: Tensor | None = None

    @property
    def backbone(self) -> BlockHead:
        """The heads without the Markov head."""
        return BlockHead(self.rows, self.weight_VH)

    def ordered(self, order_N: Tensor) -> BlockHead:
        """The heads without the confidence head, with all rows in another order, as one step."""
        low = None if self.low_Nr is None else pick_rows(self.low_Nr, order_N)
        return BlockHead([pick_rows(torch.cat(self.rows), order_N)], self.weight_VH, low, self.low_weight_Vr)

    def add_low_(self, logits_RV: Tensor, part: slice) -> None:
        """Add the Markov head's logits of the rows `part`, if there is one."""
        if self.low_Nr is None or self.low_weight_Vr is None:
            return
        if logits_RV.dtype == self.low_Nr.dtype:
            logits_RV.addmm_(self.low_Nr[part], self.low_weight_Vr.t())
        else:
            logits_RV += self.low_Nr[part] @ self.low_weight_Vr.t()


class _Attach(torch.autograd.Function):
    """A scalar with precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """Args: tensors: `count` inputs, then their gradients."""
        ctx.count = count
        ctx.save_for_backward(*tensors[count:])
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The precomputed gradients times `grad`."""
        known = [x * grad.to(x.dtype) for x in ctx.saved_tensors]
        return (grad, None, *known, *(None for _ in known))


class _Rows:
    """Row losses that `fused_head` calls chunk by chunk; records what it found for every row.

    With a kernel, `in_place` also computes the loss without the Markov head, from the same product of states and LM
    head, and adds the two gradients before they leave the logits.

    Args:
        kernel: `losses.vocab_parallel.kernel_row_loss`.
        kernels: operators (`ops.backend.load`).
        pace: determines the weights of a chunk, in place of those given.
        own: see `block_losses`.
    """

    def __init__(
        self, head: BlockHead, teacher: Teacher, weight_N: Tensor, objective: ObjectiveConfig,
        group: dist.ProcessGroup, kernel: InPlace | None = None, kernels: Any = None, pace: Pace | None = None,
        own: OwnLoss | None = None,
    ) -> None:  # fmt: skip
        self.head, self.teacher, self.weight_N, self.objective, self.group = head, teacher, weight_N, objective, group
        self.kernel, self.kernels, self.pace, self.own, self.done = kernel, kernels, pace, own, 0
        none = weight_N.new_zeros(0)
        self.weight, self.loss, self.overlap, self.bare = [none], [none], [none], [none]
        self.best = [none.long()]
        self.gradients: list[Tensor] = []
        if head.low_Nr is not None and head.low_weight_Vr is not None:
            wide = torch.promote_types(head.low_Nr.dtype, torch.float32)
            self.gradients = [torch.zeros_like(x, dtype=wide) for x in (head.low_Nr, head.low_weight_Vr)]

    @property
    def share(self) -> float:
        """Share of the loss without the Markov head that `in_place` computes."""
        return self.objective.backbone_weight if self.kernel is not None and self.gradients else 0.0

    def _next(self, count: int) -> slice:
        part = slice(self.done, self.done + count)
        self.done = part.stop
        return part

    def _losses(self, logits_RV: Tensor, rows_R: Tensor) -> RowLosses:
        goal = self.objective
        if self.own is None and goal.loss_kind == "ce_l1":
            weights = (goal.ce_weight, goal.l1_weight)
            return block.ce_l1_rows(logits_RV, self.teacher, rows_R, goal.temperature, self.group, weights)
        return row_losses(logits_RV, self.teacher, rows_R, self.own or goal.loss_kind, goal.temperature, self.group)

    def _add_low_gradients(self, grad_RV: Tensor, part: slice) -> None:
        """From the gradient of the weighted losses."""
        assert self.head.low_Nr is not None and self.head.low_weight_Vr is not None
        self.gradients[0][part] = grad_RV @ self.head.low_weight_Vr
        add_product(self.gradients[1], grad_RV.t(), self.head.low_Nr[part])

    @torch.no_grad()
    def __call__(self, logits_RV: Tensor, rows_R: Tensor) -> RowLosses:
        """See `ops.head.RowLoss`."""
        part, head = self._next(len(rows_R)), self.head
        head.add_low_(logits_RV, part)
        result = self._losses(logits_RV, rows_R)
        self.overlap.append(result.overlap_R)
        if head.low_Nr is not None:
            self._add_low_gradients((result.grad_RD * self.weight_N[part, None]).to(head.low_Nr.dtype), part)
        return result

    @torch.no_grad()
    def in_place(self, logits_RV: Tensor, rows_R: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ops.head.RowLossInPlace`."""
        assert self.kernel is not None
        part, head, share = self._next(len(rows_R)), self.head, self.share
        bare_RV = logits_RV.clone() if share else None
        head.add_low_(logits_RV, part)
        if self.pace is not None:
            given = (self.teacher, rows_R, self.objective.temperature, self.group, self.kernels)
            weight_R.copy_(self.pace.weights(block.label_probabilities(logits_RV, *given), part))
        self.weight.append(weight_R)
        found = self.kernel(logits_RV, rows_R, weight_R * (1 - share))
        for kept, x in zip((self.loss, self.overlap, self.best), found, strict=True):
            kept.append(x)
        if self.gradients:
            self._add_low_gradients(logits_RV, part)
        if bare_RV is not None:
            self.bare.append(self.kernel(bare_RV, rows_R, weight_R * share)[0])
            logits_RV += bare_RV
        return found

    def with_bare(self, total: Tensor) -> Tensor:
        """The total of `in_place` with its share of the loss without the Markov head; the gradient already has it."""
        if not self.share:
            return total
        bare = (torch.cat(self.bare) * torch.cat(self.weight)).sum()
        return total + self.share * (bare - total).detach()

    def attach(self, total: Tensor) -> Tensor:
        """The total, with the Markov head's gradients attached."""
        if not self.gradients:
            return total
        inputs = [x for x in (self.head.low_Nr, self.head.low_weight_Vr) if x is not None]
        known = [g.to(x.dtype) for g, x in zip(self.gradients, inputs, strict=True)]
        out: Tensor = _Attach.apply(total, len(inputs), *inputs, *known)  # type: ignore[no-untyped-call]
        return out


def _step_weights(head: BlockHead, plan: BlockPlan, objective: ObjectiveConfig, counted_U: Tensor | None) -> Tensor:
    """[N] exponential weights; 0 for rows that do not count."""
    gamma = objective.block_gamma or block.default_gamma(plan.slots)
    rows = plan.supervision.rows
    weights = block.exponential_weights(len(rows), gamma)
    wide = torch.promote_types(head.weight_VH.dtype, torch.float32)
    found_N = torch.cat([torch.full_like(r, w, dtype=wide) for r, w in zip(rows, weights, strict=True)])
    return found_N if counted_U is None else found_N * counted_U[torch.cat(plan.supervision.teacher_rows)]


def _pace(
    plan: BlockPlan, objective: ObjectiveConfig, order_N: Tensor, wide: torch.dtype, counted_U: Tensor | None
) -> Pace:
    """Args: order_N: of the rows."""
    block_N, step_N = plan.places()
    shape = (len(plan.tokens_P), len(plan.supervision.rows))
    counted_N = torch.ones_like(order_N, dtype=wide)
    if counted_U is not None:
        counted_N = counted_U[torch.cat(plan.supervision.teacher_rows)[order_N]].to(wide)
    return Pace((block_N[order_N], step_N[order_N]), shape, objective.pace_alpha, counted_N)


@torch.no_grad()
def _paced_weights(
    head: BlockHead, plan: BlockPlan, labelled: Teacher, objective: ObjectiveConfig, group: dist.ProcessGroup,
    counted_U: Tensor | None,
) -> Tensor:  # fmt: skip
    """[N] D-PACE weights, from products with the vocabulary of their own, chunk by chunk."""
    x_NH, rows_N, found = torch.cat(head.rows), torch.cat(plan.supervision.teacher_rows), []
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    for part in row_chunks(len(x_NH), chunk_rows(head.weight_VH, columns=labelled.columns)):
        logits = (x_NH[part] @ head.weight_VH.t()).to(wide)
        head.add_low_(logits, part)
        found.append(block.label_probabilities(logits, labelled, rows_N[part], objective.temperature, group))
    q_N = torch.cat(found) if found else x_NH.new_zeros(0, dtype=wide)
    return _pace(plan, objective, torch.arange(len(q_N), device=q_N.device), wide, counted_U).weights(q_N)


def _against_text(
    plan: BlockPlan, teacher: Teacher, objective: ObjectiveConfig, ids_V: Tensor | None, own: OwnLoss | None
) -> tuple[Teacher, Tensor | None]:
    """(the teacher with the tokens of the text as labels, bool [U] rows that count; None: all of them).

    A token that a reduced vocabulary lacks is replaced by the base's choice in it, and its row does not count where the
    loss or its weight reads the text.
    """
    if ids_V is None:
        return dataclasses.replace(teacher, label_U=plan.labels_U), None
    text_U = ids_V[plan.labels_U]
    known_U = text_U >= 0
    label_U = torch.where(known_U, text_U, teacher.label_U)
    labelled = dataclasses.replace(teacher, label_U=label_U, in_vocab_U=known_U)
    if not objective.in_vocab_only:
        return labelled, None
    loss_reads_text = own is None and objective.loss_kind in ("hard_ce", "ce_l1")
    if loss_reads_text or objective.block_weights != "exponential":
        return labelled, teacher.in_vocab_U & known_U
    return labelled, teacher.in_vocab_U


def block_losses(
    head: BlockHead, plan: BlockPlan, teacher: Teacher, objective: ObjectiveConfig, group: dist.ProcessGroup,
    paths: Paths = NO_PATHS, own: OwnLoss | None = None, ids_V: Tensor | None = None,
) -> DraftLosses:  # fmt: skip
    """Losses of all steps. `hard_ce`, `ce_l1` and D-PACE compare with the text, the others with the base.

    Accuracy compares with the base's argmax, as for all drafts.

    Args:
        own: the draft's `row_loss`, in place of the objective's.
        ids_V: draft id of every token or -1, of a reduced draft vocabulary.
    """
    labelled, counted_U = _against_text(plan, teacher, objective, ids_V, own)
    target_U = torch.where(teacher.in_vocab_U, teacher.label_U, -1)
    found = _Pass(head, plan, labelled, target_U, objective, group, paths, own, counted_U)
    total, stats, weight_N, overlap_N = found.losses()
    if head.confidence_N is not None and objective.confidence_weight:
        confidence = block.confidence_losses(head.confidence_N.to(overlap_N.dtype), overlap_N)
        total = total + objective.confidence_weight * (weight_N * confidence).sum()
    counts = torch.tensor([len(r) for r in plan.supervision.rows], dtype=stats.dtype)
    rows_T = to_device(counts, stats.device)
    counted = None if counted_U is None else counted_U[plan.supervision.teacher_rows[0]].sum()
    return DraftLosses(total, stats[:, 0], stats[:, 1], stats[:, 2], rows_T, counted)


@dataclass
class _Pass:
    """LM head and losses of all rows.

    Attributes:
        labelled: the teacher, with the tokens of the text as labels.
        target_U: draft id that counts as correct at each teacher row, or -1.
        counted_U: bool, rows that the loss counts; None: all.
    """

    head: BlockHead
    plan: BlockPlan
    labelled: Teacher
    target_U: Tensor
    objective: ObjectiveConfig
    group: dist.ProcessGroup
    paths: Paths
    own: OwnLoss | None = None
    counted_U: Tensor | None = None

    def losses(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(total, stats [T, 3] of `fused_head`, weight [N], overlap [N]), step by step."""
        rows_N, paced = torch.cat(self.plan.supervision.teacher_rows), self.objective.block_weights != "exponential"
        fast = "none" if self.own else self.paths.under(self.objective).kernels("loss_kernel")
        if fast != "none":
            return self._paced(backend.load(fast), rows_N) if paced else self._in_place(backend.load(fast), rows_N)
        if paced:
            given = (self.head, self.plan, self.labelled, self.objective, self.group, self.counted_U)
            weight_N = _paced_weights(*given)
        else:
            weight_N = _step_weights(self.head, self.plan, self.objective, self.counted_U)
        total, stats, overlap_N = self._plain(self.head, weight_N)
        share = self.objective.backbone_weight
        if share and self.head.low_Nr is not None:
            total = share * self._plain(self.head.backbone, weight_N)[0] + (1 - share) * total
        return total, stats, weight_N, overlap_N

    def _steps(self, weight_N: Tensor) -> list[StepRows]:
        rows = self.plan.supervision.teacher_rows
        parts = weight_N.split([len(r) for r in rows])
        return [StepRows(r, w, self.target_U[r]) for r, w in zip(rows, parts, strict=True)]

    def _plain(self, head: BlockHead, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fast, weight_VH = self.paths.kernels(), head.weight_VH
        scale_ = None if fast == "none" else backend.load(fast).scale_
        row_loss = _Rows(head, self.labelled, weight_N, self.objective, self.group, own=self.own)
        chunks = row_chunks(len(weight_N), chunk_rows(weight_VH, columns=self.labelled.columns))
        total, stats = fused_head(head.rows, weight_VH, self._steps(weight_N), row_loss, None, scale_, chunks)
        return row_loss.attach(total), stats, torch.cat(row_loss.overlap)

    def _rows(self, head: BlockHead, kernels: Any, weight_N: Tensor, pace: Pace | None = None) -> _Rows:
        goal, weights = self.objective, (self.objective.ce_weight, self.objective.l1_weight)
        kernel = kernel_row_loss(self.labelled, goal.loss_kind, goal.temperature, self.group, kernels, weights)
        return _Rows(head, self.labelled, weight_N, goal, self.group, kernel, kernels, pace)

    def _in_place(self, kernels: Any, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head, weight_N = self.head, _step_weights(self.head, self.plan, self.objective, self.counted_U)
        found = self._rows(head, kernels, weight_N)
        chunks = row_chunks(len(rows_N), chunk_rows(head.weight_VH, True, self.labelled.columns))
        parts = (self._steps(weight_N), found, found.in_place, kernels.scale_, chunks)
        total, stats = fused_head(head.rows, head.weight_VH, *parts)
        return found.attach(found.with_bare(total)), stats, weight_N, torch.cat(found.overlap)

    def _paced(self, kernels: Any, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """D-PACE in one pass: block by block, so that a chunk's probabilities determine its weights."""
        most = chunk_rows(self.head.weight_VH, True, self.labelled.columns)
        order_N, chunks = self.plan.by_block(most)
        head, rows_N = self.head.ordered(order_N), rows_N[order_N]
        wide = torch.promote_types(head.weight_VH.dtype, torch.float32)
        steps = [StepRows(rows_N, torch.zeros_like(rows_N, dtype=wide), self.target_U[rows_N])]
        pace = _pace(self.plan, self.objective, order_N, wide, self.counted_U)
        found = self._rows(head, kernels, steps[0].weight_R, pace)
        total, _ = fused_head(head.rows, head.weight_VH, steps, found, found.in_place, kernels.scale_, chunks)
        correct = (torch.cat(found.best) == steps[0].target_R).to(wide)
        weight = torch.cat(found.weight)
        loss = torch.where(weight > 0, torch.cat(found.loss), 0)  # as in `fused_head`
        sorted_N4 = torch.stack([loss, correct, torch.cat(found.overlap), weight], 1)
        rows_N4 = torch.empty_like(sorted_N4).index_copy_(0, order_N, sorted_N4)
        counts = [len(r) for r in self.plan.supervision.rows]
        stats = torch.stack([part.sum(0) for part in rows_N4[:, :3].split(counts)])
        return found.attach(found.with_bare(total)), stats, rows_N4[:, 3], rows_N4[:, 2]
