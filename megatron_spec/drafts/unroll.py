"""Training-time test (EAGLE-3, arXiv 2503.01840 section 3.2): the draft is unrolled on its own output for T steps.

Row j at step k reads token t_{j+1+k} and its own state of step k, is compared with the base's logits z_{j+1+k}, and
predicts t_{j+2+k}. Everything about which row is supervised when is decided here, once per micro-batch; only
supervised rows reach the head.

T draft steps, S sequence, B micro-batch, H draft hidden size, R supervised rows of a step, U rows of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import Alignment, ObjectiveConfig
from megatron_spec.drafts.base import Attention, BaseEnds, DraftLosses, shift
from megatron_spec.drafts.linear import copy_to_ranks, enter
from megatron_spec.drafts.teacher import TeacherHead
from megatron_spec.losses.vocab_parallel import Teacher, row_losses
from megatron_spec.ops.fused_head import StepRows, fused_head
from megatron_spec.ops.ttt_attention import TrainingTimeTest, trunk_layout

Step = Callable[[Tensor, Tensor, Tensor, Attention], tuple[Tensor, Tensor]]
"""(hidden [S,B,H], embedding [S,B,H], positions [B,S], attention) -> (state fed back, state read by the head)."""


def supervised_rows(batch: Batch, steps: int, alignment: Alignment) -> Tensor:
    """bool [T, B, S]: row j is supervised at step k.

    serving: t_{j+1}..t_{j+2+k} are all in one assistant turn; paper: t_{j+k} is in any; target: t_{j+2+k} is.
    Always: row and target lie in the same document, and neither is padding.
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


@dataclass
class Supervision:
    """Supervised rows as indices into the flattened [S * B] rows.

    Attributes:
        rows: per step int64 [R], row of the draft.
        teacher_rows: per step int64 [R], position of its teacher row inside `teacher_U`.
        teacher_U: int64 [U], rows of the base that some step is compared with.
    """

    rows: list[Tensor]
    teacher_rows: list[Tensor]
    teacher_U: Tensor

    @staticmethod
    def of(batch: Batch, steps: int, alignment: Alignment) -> Supervision:
        """From the turns and documents of a micro-batch."""
        B = batch.tokens_BS.shape[0]
        flat = [mask.t().flatten().nonzero()[:, 0] for mask in supervised_rows(batch, steps, alignment)]
        wanted = [rows + (1 + k) * B for k, rows in enumerate(flat)]  # row j is compared with z_{j+1+k}
        needed = torch.zeros(batch.tokens_BS.numel(), dtype=torch.bool, device=batch.tokens_BS.device)
        for rows in wanted:
            needed[rows] = True
        place = needed.cumsum(0) - 1
        return Supervision(flat, [place[rows] for rows in wanted], needed.nonzero()[:, 0])


def teach(
    features: Features, supervision: Supervision, head: TeacherHead, temperature: float, group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Teacher:
    """The base's opinion at every row that some step needs."""
    with torch.no_grad():
        state = enter(features.state_SBH, group, sequence_parallel)
        return head(state.flatten(0, 1)[supervision.teacher_U], temperature)


def pick_rows(x_SBH: Tensor, rows_R: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[R, H] rows of a state, as input of the vocab-parallel head: gradients are summed over tensor parallel ranks."""
    if sequence_parallel:
        return enter(x_SBH, group, True).flatten(0, 1).index_select(0, rows_R)
    return copy_to_ranks(x_SBH.flatten(0, 1).index_select(0, rows_R), group)


def head_losses(
    states: list[Tensor], weight_DH: Tensor, supervision: Supervision, teacher: Teacher, objective: ObjectiveConfig,
    group: dist.ProcessGroup,
) -> DraftLosses:
    """Losses of all steps from the supervised rows [R, H] of each."""
    steps = []
    for k, rows in enumerate(supervision.teacher_rows):
        inside = teacher.in_vocab_U[rows]
        weight = torch.full_like(teacher.lse_U[rows], objective.step_decay**k)
        if objective.in_vocab_only:
            weight = weight * inside
        steps.append(StepRows(rows, weight, torch.where(inside, teacher.label_U[rows], -1)))

    def row_loss(logits_RD: Tensor, rows_R: Tensor):  # type: ignore[no-untyped-def]
        return row_losses(logits_RD, teacher, rows_R, objective.loss, objective.temperature, group)

    total, stats = fused_head(states, weight_DH, steps, row_loss)
    rows_T = torch.tensor([len(rows) for rows in supervision.rows], dtype=stats.dtype, device=stats.device)
    return DraftLosses(total, stats[:, 0], stats[:, 1], stats[:, 2], rows_T)


def unroll(
    step: Step, hidden_SBH: Tensor, features: Features, ends: BaseEnds, supervision: Supervision,
    objective: ObjectiveConfig, group: dist.ProcessGroup, sequence_parallel: bool,
) -> list[Tensor]:
    """Run the draft T times on its own output; returns the supervised rows [R, H] of every step, for the head.

    Args:
        step: the draft's `layer_step`.
        hidden_SBH: state of step 0 ([S / TP, B, H] under sequence parallelism).
    """
    batch = features.batch
    attention = TrainingTimeTest(trunk_layout(batch.documents_BS, hidden_SBH.dtype), objective.detach)
    states = []
    for k, rows in enumerate(supervision.rows):
        with torch.no_grad():
            embedding = ends.embed(shift(batch.tokens_BS, 1 + k, 1)).to(hidden_SBH.dtype)
        fed_back, normed = step(hidden_SBH, embedding, batch.positions_BS + k, attention)
        states.append(pick_rows(normed, rows, group, sequence_parallel))
        hidden_SBH = fed_back.detach() if objective.detach else fed_back
    return states
