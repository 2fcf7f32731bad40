"""Training-time test (EAGLE-3, arXiv 2503.01840 section 3.2): the draft is unrolled on its own output for T steps.
See docs/algorithms.md#training-time-test.

Row j at step k reads token t_{j+1+k} and its own state of step k, predicts t_{j+2+k}, and is compared with the base's
logits z_{j+1+k}. The supervised rows of each step are determined here, once per micro-batch; only these reach the LM
head.

T draft steps, S sequence, B micro-batch, H draft hidden size, R supervised rows of a step, U teacher rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import Alignment, ObjectiveConfig
from megatron_spec.drafts.contract import Attention, DraftLosses, shift
from megatron_spec.drafts.linear import copy_to_ranks, enter
from megatron_spec.drafts.pace import Pace
from megatron_spec.drafts.teacher import TeacherHead
from megatron_spec.losses.vocab_parallel import OwnLoss, Teacher, kernel_row_loss, row_losses
from megatron_spec.ops import backend
from megatron_spec.ops.head import StepRows, Weigh, chunk_rows, fused_head, row_chunks, whole_chunks
from megatron_spec.ops.rows import pick_rows
from megatron_spec.ops.ttt_attention import TrainingTimeTest
from megatron_spec.ops.visibility import Visibility
from megatron_spec.planning.paths import NO_PATHS, Paths
from megatron_spec.runtime.platform import to_device

_AHEAD = ThreadPoolExecutor(1, "supervision")

Step = Callable[[Tensor, Tensor, Tensor, Attention], tuple[Tensor, Tensor]]
"""(hidden [S,B,H], embedding [S,B,H], positions [B,S], attention) -> (state fed back, input of the LM head)."""


def supervised_rows(batch: Batch, steps: int, alignment: Alignment) -> Tensor:
    """bool [T, B, S]: row j is supervised at step k.

    serving: t_{j+1}..t_{j+2+k} are all in one assistant turn; paper: t_{j+k} is in any; target: t_{j+2+k} is.
    In all three, row and target are in the same document, and neither is padding.
    """
    turns, documents = batch.turns_BS, batch.documents_BS
    first = shift(turns, 1, 1)
    same_turn = first > 0
    steps_TBS = []
    for k in range(steps):
        inside = (documents >= 0) & (shift(documents, 2 + k, 1, fill=-1) == documents)
        if alignment == "serving":
            same_turn = same_turn & (shift(turns, 2 + k, 1) == first)
            steps_TBS.append(same_turn & inside)
        else:
            steps_TBS.append((shift(turns, k if alignment == "paper" else 2 + k, 1) > 0) & inside)
    return torch.stack(steps_TBS)


def _indices_of(mask_TN: Tensor) -> list[Tensor]:
    """Per row of the mask, the indices where it is True, with one device synchronisation in all."""
    counts = mask_TN.sum(1).tolist()
    return list(mask_TN.nonzero()[:, 1].split(counts))


@dataclass
class Supervision:
    """Supervised rows as indices into [S * B].

    Attributes:
        rows: int64 [R] per step, supervised rows of the draft on this rank, ascending.
        active: int64 per step, rows that are supervised at this step or a later one; only these have to be computed.
        teacher_rows: int64 [R] per step, index of each supervised row's teacher row in `teacher_U`.
        teacher_U: int64 [U], teacher rows: rows of the base, in the full sequence, that some step is compared with.
        rejected: int64 [R] per step, 1 where the base once put the target token t_{j+2+k} in place of a rejected draft
            token (`Batch.rejected_BS`), else 0; empty if the micro-batch has no such token.
        counts_P: int64 [P], number of supervised steps of each of the P rows that have any; on the host if the batch
            has a host copy.
    """

    rows: list[Tensor]
    active: list[Tensor]
    teacher_rows: list[Tensor]
    teacher_U: Tensor
    rejected: list[Tensor] = field(default_factory=list)
    counts_P: Tensor | None = None

    def by_row(self, most: int) -> tuple[Tensor, list[slice]]:
        """(order [N] that puts the rows of all steps row by row, chunks of so ordered rows: `whole_chunks`)."""
        assert self.counts_P is not None
        return torch.cat(self.rows).argsort(stable=True), whole_chunks(self.counts_P.cpu(), most)

    @staticmethod
    def of(
        batch: Batch, steps: int, alignment: Alignment, kept: Callable[[Batch], Tensor] | None = None
    ) -> Supervision:
        """From the turns and documents of a micro-batch; under context parallelism, this rank's rows.

        Computed on the host if the batch has a host copy, so as not to wait for the base's forward.

        Args:
            kept: gives bool [T, B, S] for a batch, rows that may be supervised at each step; None: all.
        """
        if kept is None and batch.planned is not None and batch.planned[0] == (steps, alignment):
            found: Supervision = batch.planned[1].result()
        else:
            found = Supervision._of(batch.host or batch, steps, alignment, kept)
        return found if batch.host is None else found._to(batch.tokens_BS.device)

    @staticmethod
    def ahead(batch: Batch, steps: int, alignment: Alignment) -> None:
        """Begin to compute what `of` will return, in a thread, if the batch has a host copy: 5 ms for 8,192 tokens, in
        which the host launches the kernels of a small base."""
        if batch.host is not None:
            batch.planned = (steps, alignment), _AHEAD.submit(Supervision._of, batch.host, steps, alignment)

    def _to(self, device: torch.device) -> Supervision:
        """Copy all indices to a device, in one transfer."""
        lists = [self.rows, self.active, self.teacher_rows, [self.teacher_U], self.rejected]
        flat = [x for part in lists for x in part]
        moved = iter(to_device(torch.cat(flat), device).split([len(x) for x in flat]))
        rows, active, teacher_rows, teacher_U, rejected = ([next(moved) for _ in part] for part in lists)
        return Supervision(rows, active, teacher_rows, teacher_U[0], rejected, self.counts_P)

    @staticmethod
    def _of(
        batch: Batch, steps: int, alignment: Alignment, kept: Callable[[Batch], Tensor] | None = None
    ) -> Supervision:
        B = batch.tokens_BS.shape[0]
        mask_TBS = supervised_rows(batch, steps, alignment)
        if kept is not None:
            mask_TBS &= kept(batch)
        mask_TN = (mask_TBS if batch.context is None else batch.context.part(mask_TBS, 2)).transpose(1, 2).flatten(1)
        rows = _indices_of(mask_TN)
        active = _indices_of(mask_TN.flip(0).cumsum(0).flip(0) > 0)
        wanted = [batch.whole_rows(r) + (1 + k) * B for k, r in enumerate(rows)]  # row j is compared with z_{j+1+k}
        needed = torch.zeros_like(mask_TBS[0]).flatten()
        for r in wanted:
            needed[r] = True
        place, rejected = needed.cumsum(0) - 1, []
        if (
            batch.rejected_BS is not None
        ):  # row j of step k predicts t_{j+2+k}, which follows the row it is compared with
            following_N = shift(batch.rejected_BS, 1, 1).t().flatten().long()
            rejected = [following_N[r] for r in wanted]
        teacher_rows = [place[r] for r in wanted]
        return Supervision(rows, active, teacher_rows, needed.nonzero()[:, 0], rejected, mask_TN.sum(0)[active[0]])


@torch.no_grad()
def teacher_state(
    features: Features, supervision: Supervision, group: dist.ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """[U, H] the base's final state at the teacher rows. Collective under context parallelism."""
    state, context = enter(features.state_SBH, group, sequence_parallel), features.batch.context
    if context is None:
        return state.flatten(0, 1)[supervision.teacher_U]
    return context.pick(state, supervision.teacher_U, len(supervision.rows))


def teach(
    features: Features,
    supervision: Supervision,
    head: TeacherHead,
    temperature: float,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Teacher:
    """The teacher at every row that some step is compared with."""
    state_UH = teacher_state(features, supervision, group, sequence_parallel)
    return head(state_UH, temperature, features.argmax_of(supervision.teacher_U))


def head_rows(x_SBH: Tensor, rows_R: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[R, H] rows of a state as input of a vocab-parallel LM head: gradients are summed over tensor parallel ranks."""
    if sequence_parallel:
        return pick_rows(enter(x_SBH, group, True).flatten(0, 1), rows_R)
    return copy_to_ranks(pick_rows(x_SBH.flatten(0, 1), rows_R), group)


def _paced(
    supervision: Supervision, teacher: Teacher, objective: ObjectiveConfig, group: dist.ProcessGroup, size: int,
    kernels: Any,
) -> tuple[list[slice], Tensor, Weigh]:  # fmt: skip
    """(chunks, order, weights) of D-PACE for `fused_head`: the steps of a row are one proposal, in one chunk."""
    rows, active_P = supervision.rows, supervision.active[0]
    order_N, chunks = supervision.by_row(size)
    row_N = torch.searchsorted(active_P, torch.cat(rows)[order_N])
    step_N = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])[order_N]
    counted_N = teacher.in_vocab_U[torch.cat(supervision.teacher_rows)[order_N]]
    if not objective.in_vocab_only:
        counted_N = torch.ones_like(counted_N)
    shape = (len(active_P), len(rows))
    pace = Pace((row_N, step_N), shape, objective.pace_alpha, counted_N.to(teacher.lse_U.dtype))
    return chunks, order_N, pace.weigh(teacher, objective.temperature, group, kernels)


def _step_rows(supervision: Supervision, teacher: Teacher, objective: ObjectiveConfig) -> list[StepRows]:
    """The supervised rows of every step; their weights without D-PACE."""
    paced, steps = objective.step_weights == "d-pace", []
    for k, rows in enumerate(supervision.teacher_rows):
        inside = teacher.in_vocab_U[rows]
        weight = torch.full_like(teacher.lse_U[rows], 1.0 if paced else objective.decay**k)
        if objective.in_vocab_only:
            weight = weight * inside
        if supervision.rejected and objective.replay_weight != 1:
            weight = torch.where(supervision.rejected[k] > 0, objective.replay_weight * weight, weight)
        steps.append(StepRows(rows, weight, torch.where(inside, teacher.label_U[rows], -1)))
    return steps


def head_losses(
    states: list[Tensor],
    weight_DH: Tensor,
    supervision: Supervision,
    teacher: Teacher,
    objective: ObjectiveConfig,
    group: dist.ProcessGroup,
    labels_U: Tensor | None = None,
    paths: Paths = NO_PATHS,
    own: OwnLoss | None = None,
) -> DraftLosses:
    """Losses of all steps from the supervised rows [R, H] of each.

    Args:
        labels_U: draft ids as targets of `hard_ce`; default: the base's argmax. Accuracy is always against the latter.
        paths: fast paths of the draft.
        own: the draft's `row_loss`, in place of the objective's.
    """
    labelled = teacher if labels_U is None else dataclasses.replace(teacher, label_U=labels_U)
    steps = _step_rows(supervision, teacher, objective)

    def row_loss(logits_RD: Tensor, rows_R: Tensor):  # type: ignore[no-untyped-def]
        """Differentiable losses of rows of logits."""
        return row_losses(logits_RD, labelled, rows_R, own or objective.loss_kind, objective.temperature, group)

    in_place = scale_ = fp8 = kernels = epilogue = None
    if paths.kernels() != "none":
        kernels = backend.load(paths.kernels())
        scale_ = kernels.scale_
        if own is None and paths.under(objective).on("loss_kernel"):
            in_place = kernel_row_loss(labelled, objective.loss_kind, objective.temperature, group, kernels)
        if own is None and paths.under(objective).on("draft_head_fp8"):
            fp8 = kernels
        elif in_place is not None and paths.on("product_epilogues"):
            epilogue = (kernels, objective.temperature)
    size = chunk_rows(weight_DH, in_place is not None, teacher.columns)
    chunks, order_N, weigh = row_chunks(sum(map(len, states)), size), None, None
    if objective.step_weights == "d-pace":
        fast = None if in_place is None else kernels
        chunks, order_N, weigh = _paced(supervision, labelled, objective, group, size, fast)
    given = (row_loss, in_place, scale_, chunks, fp8, order_N, weigh, epilogue)
    total, stats = fused_head(states, weight_DH, steps, *given)
    rows_T = to_device(torch.tensor([len(rows) for rows in supervision.rows], dtype=stats.dtype), stats.device)
    counted = teacher.in_vocab_U[supervision.teacher_rows[0]].sum() if objective.in_vocab_only else None
    return DraftLosses(total, stats[:, 0], stats[:, 1], stats[:, 2], rows_T, counted)


def unroll(
    step: Step,
    hidden_SBH: Tensor,
    features: Features,
    embed: Callable[[Tensor], Tensor],
    supervision: Supervision,
    objective: ObjectiveConfig,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    window: int | None = None,
) -> list[Tensor]:
    """Run T draft steps on the draft's own output; returns the supervised rows [R, H] of every step, for the LM head.

    A row reads the trunk and its own branches, so from step 1 on rows that no later loss reads are dropped
    (except under sequence parallelism, where all ranks must have equally many rows).

    Args:
        step: the draft's `layer_step`.
        hidden_SBH: state of step 0 ([S / TP, B, H] under sequence parallelism).
        embed: tokens [B, S] -> input embeddings of the draft.
        window: sliding window of the draft's attention.
    """
    batch = features.batch
    attention = TrainingTimeTest(Visibility.of(batch), objective.detach, window)
    tokens_N, positions_N = batch.tokens_BS.t().flatten(), batch.positions_BS.t().flatten()
    B, states = batch.tokens_BS.shape[0], []
    for k, rows in enumerate(supervision.rows):
        if k == 0 or sequence_parallel:
            tokens, positions = batch.local(shift(batch.tokens_BS, 1 + k, 1)), batch.local(batch.positions_BS) + k
        else:
            active = supervision.active[k]
            hidden_SBH = _keep_active(hidden_SBH, attention, supervision, k)
            place = batch.whole_rows(active)
            tokens, positions = tokens_N[place + (1 + k) * B][None], positions_N[place][None] + k
            rows = torch.searchsorted(active, rows)
        fed_back, normed = step(hidden_SBH, embed(tokens), positions, attention)
        states.append(head_rows(normed, rows, group, sequence_parallel))
        hidden_SBH = fed_back.detach() if objective.detach else fed_back
    return states


def _keep_active(hidden_SBH: Tensor, attention: TrainingTimeTest, supervision: Supervision, k: int) -> Tensor:
    """[R, 1, H] rows of the previous step that are active at step k; branches are reduced to the same rows."""
    active = supervision.active[k]
    if k == 1:  # step 0 had all rows, and there is no branch yet
        attention.compact(active, None)
        return pick_rows(hidden_SBH.flatten(0, 1), active)[:, None]
    if len(active) == len(supervision.active[k - 1]):
        return hidden_SBH
    kept = torch.searchsorted(supervision.active[k - 1], active)
    attention.compact(active, kept)
    return pick_rows(hidden_SBH, kept)
