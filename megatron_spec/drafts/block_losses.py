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
from megatron_spec.losses import block
from megatron_spec.losses.vocab_parallel import (
    InPlace,
    RowLosses,
    Teacher,
    kernel_largest,
    kernel_row_loss,
    pick,
    reduce_together,
    row_losses,
)
from megatron_spec.ops import backend
from megatron_spec.ops.head import StepRows, chunk_rows, fused_head
from megatron_spec.ops.products import add_product
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
        confidence_N: logits of the confidence head for the rows of all steps, equal on all ranks.
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
    """Row losses that `fused_head` calls chunk by chunk; records the overlap of every row.

    With a kernel, `in_place` also computes the loss without the Markov head, from the same product of states and LM
    head, and adds the two gradients before they leave the logits.
    """

    def __init__(
        self, head: BlockHead, teacher: Teacher, weight_N: Tensor, objective: ObjectiveConfig,
        group: dist.ProcessGroup, kernel: InPlace | None = None,
    ) -> None:  # fmt: skip
        self.head, self.teacher, self.weight_N, self.objective, self.group = head, teacher, weight_N, objective, group
        self.kernel, self.bare = kernel, [weight_N.new_zeros(0)]
        self.done, self.overlap = 0, [weight_N.new_zeros(0)]
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
        if goal.loss == "ce_l1":
            weights = (goal.ce_weight, goal.l1_weight)
            return block.ce_l1_rows(logits_RV, self.teacher, rows_R, goal.temperature, self.group, weights)
        return row_losses(logits_RV, self.teacher, rows_R, goal.loss, goal.temperature, self.group)

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
        found = self.kernel(logits_RV, rows_R, weight_R * (1 - share))
        self.overlap.append(found[1])
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
        bare = (torch.cat(self.bare) * self.weight_N).sum()
        return total + self.share * (bare - total).detach()

    def attach(self, total: Tensor) -> Tensor:
        """The total, with the Markov head's gradients attached."""
        if not self.gradients:
            return total
        inputs = [x for x in (self.head.low_Nr, self.head.low_weight_Vr) if x is not None]
        known = [g.to(x.dtype) for g, x in zip(self.gradients, inputs, strict=True)]
        out: Tensor = _Attach.apply(total, len(inputs), *inputs, *known)  # type: ignore[no-untyped-call]
        return out


def _step_weights(
    head: BlockHead, plan: BlockPlan, objective: ObjectiveConfig, column_N: Tensor, group: dist.ProcessGroup,
    kernels: Any = None,
) -> Tensor:  # fmt: skip
    """[N] weight of every row.

    Args:
        column_N: column of the label, relative to this rank's first one.
        kernels: operators (`ops.backend.load`) if the path `loss_kernel` is on.
    """
    counts = [len(rows) for rows in plan.supervision.rows]
    wide = torch.promote_types(head.weight_VH.dtype, torch.float32)
    if objective.block_weights == "exponential":
        gamma = objective.block_gamma or block.default_gamma(plan.slots)
        weights = block.exponential_weights(len(counts), gamma)
        return torch.cat([column_N.new_full((n,), w, dtype=wide) for n, w in zip(counts, weights, strict=True)])
    q_N = _label_probabilities(head, objective.temperature, column_N, group, kernels)
    block_N, step_N = plan.places()
    q_PT = q_N.new_zeros(len(plan.tokens_P), len(counts))
    q_PT[block_N, step_N] = q_N
    supervised_PT = torch.zeros_like(q_PT)
    supervised_PT[block_N, step_N] = 1
    return block.pace_weights(q_PT, supervised_PT, objective.pace_alpha)[block_N, step_N].to(wide)


@torch.no_grad()
def _label_probabilities(
    head: BlockHead, temperature: float, column_N: Tensor, group: dist.ProcessGroup, kernels: Any
) -> Tensor:
    """[N] the draft's probability of every label, computed chunk by chunk.

    Args:
        kernels: operators (`ops.backend.load`); None: plain ones.
    """
    x_NH, found = torch.cat(head.rows), [column_N.new_zeros(0, dtype=torch.float32)]
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    size = chunk_rows(head.weight_VH, kernels is not None)
    for start in range(0, len(x_NH), size):
        part = slice(start, start + size)
        logits = x_NH[part] @ head.weight_VH.t()
        logits = logits if kernels is not None else logits.to(wide)
        head.add_low_(logits, part)
        if kernels is None:
            found.append(block.label_probabilities(logits / temperature, column_N[part], group))
            continue
        lse_R, _ = kernel_largest(logits, 0, temperature, group, kernels)
        at_R = pick(logits, column_N[part])[2].to(lse_R.dtype) / temperature
        reduce_together(group, at_R)
        found.append((at_R - lse_R).exp())
    return torch.cat(found[1:] or found)


def block_losses(
    head: BlockHead, plan: BlockPlan, teacher: Teacher, objective: ObjectiveConfig, group: dist.ProcessGroup,
    paths: Paths = NO_PATHS,
) -> DraftLosses:  # fmt: skip
    """Losses of all steps. `hard_ce`, `ce_l1` and D-PACE compare with the text, the others with the base.

    Accuracy compares with the base's argmax, as for all drafts.
    """
    rows = plan.supervision.teacher_rows
    all_N = torch.cat(rows)
    told = dataclasses.replace(teacher, label_U=plan.labels_U)
    fast = paths.under(objective).kernels("loss_kernel")
    kernels = None if fast == "none" else backend.load(fast)
    weight_N = _step_weights(head, plan, objective, plan.labels_U[all_N] - teacher.first, group, kernels)
    steps = [
        StepRows(r, w, teacher.label_U[r]) for r, w in zip(rows, weight_N.split([len(r) for r in rows]), strict=True)
    ]
    total, stats, overlap_N = _one_pass(head, steps, told, weight_N, objective, group, paths)
    share = objective.backbone_weight
    if share and head.low_Nr is not None and kernels is None:
        plain, _, _ = _one_pass(head.backbone, steps, told, weight_N, objective, group, paths)
        total = share * plain + (1 - share) * total
    if head.confidence_N is not None and objective.confidence_weight:
        confidence = block.confidence_losses(head.confidence_N.to(overlap_N.dtype), overlap_N)
        total = total + objective.confidence_weight * (weight_N * confidence).sum()
    counts = torch.tensor([len(r) for r in rows], dtype=stats.dtype)
    return DraftLosses(total, stats[:, 0], stats[:, 1], stats[:, 2], to_device(counts, stats.device))


def _one_pass(
    head: BlockHead, steps: list[StepRows], told: Teacher, weight_N: Tensor, objective: ObjectiveConfig,
    group: dist.ProcessGroup, paths: Paths,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(total, stats [T, 3], overlap [N]) of all rows; a kernel's total includes the loss without the Markov head."""
    kernel = scale_ = None
    if paths.kernels() != "none":
        kernels = backend.load(paths.kernels())
        scale_ = kernels.scale_
        if paths.under(objective).on("loss_kernel"):
            weights = (objective.ce_weight, objective.l1_weight)
            kernel = kernel_row_loss(told, objective.loss, objective.temperature, group, kernels, weights)
    row_loss = _Rows(head, told, weight_N, objective, group, kernel)
    in_place = None if kernel is None else row_loss.in_place
    total, stats = fused_head(head.rows, head.weight_VH, steps, row_loss, in_place, scale_)
    return row_loss.attach(row_loss.with_bare(total)), stats, torch.cat(row_loss.overlap)
