"""D-PACE weights of the steps of an EAGLE draft, in place of step_decay ** k (docs/algorithms.md#losses).

R rows of a step, N rows of all steps, P rows that any step supervises, T draft steps, H draft hidden size, D this
rank's shard of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.config import ObjectiveConfig
from megatron_spec.losses import block
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops.head import chunk_rows, row_chunks


@torch.no_grad()
def paced_weights(
    states: list[Tensor],
    weight_DH: Tensor,
    rows: list[Tensor],
    active_P: Tensor,
    teacher_rows: list[Tensor],
    teacher: Teacher,
    objective: ObjectiveConfig,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """[R] weights of every step: the steps k of a row of the draft are the tokens of one proposal.

    The acceptance of a step is the draft's probability of the base's most likely token; 0 where the draft's vocabulary
    lacks it.

    Args:
        states: [R, H] input of the LM head at every step.
        rows: [R] the draft's rows at every step, a subset of `active_P`, both ascending.
        teacher_rows: [R] teacher row of each, per step.
    """
    told_N = torch.cat(teacher_rows)
    inside_N = teacher.in_vocab_U[told_N]
    q_N = label_probabilities(torch.cat(states), weight_DH, told_N, teacher, objective.temperature, group)
    q_N = torch.where(inside_N, q_N.to(teacher.lse_U.dtype), 0)
    places = (
        torch.cat([torch.searchsorted(active_P, r) for r in rows]),
        torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)]),
    )
    q_PT, supervised_PT = (q_N.new_zeros(len(active_P), len(rows)) for _ in range(2))
    q_PT[places] = q_N
    supervised_PT[places] = inside_N.to(q_N.dtype) if objective.in_vocab_only else torch.ones_like(q_N)
    weight_N = block.pace_weights(q_PT, supervised_PT, objective.pace_alpha)[places]
    return list(weight_N.split([len(r) for r in rows]))


@torch.no_grad()
def label_probabilities(
    x_NH: Tensor, weight_DH: Tensor, rows_N: Tensor, teacher: Teacher, temperature: float,
    group: dist.ProcessGroup | None, add_: Callable[[Tensor, slice], object] | None = None,
) -> Tensor:  # fmt: skip
    """[N] the draft's probability of `teacher.label_U` at each teacher row, computed chunk by chunk.

    Args:
        add_: adds to the logits of a chunk, in place, what does not come from the LM head.
    """
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    found = []
    for part in row_chunks(len(x_NH), chunk_rows(weight_DH, columns=teacher.columns)):
        logits_RD = (x_NH[part] @ weight_DH.t()).to(wide)
        if add_ is not None:
            add_(logits_RD, part)
        column_R = teacher.label_U[rows_N[part]] - teacher.first
        found.append(block.label_probabilities(logits_RD / temperature, column_R, group))
    return torch.cat(found) if found else x_NH.new_zeros(0, dtype=wide)
