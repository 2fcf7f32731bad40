"""Weights and losses of block drafts, on one shard of the vocabulary.

P blocks, T steps, R rows, D this rank's shard of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.losses.vocab_parallel import (
    Largest,
    RowLosses,
    Teacher,
    argmax_and_lse,
    kernel_largest,
    log_probabilities,
    pick,
    reduce_together,
)

GAMMAS = ((16, 7.0), (10, 5.0), (8, 4.0))
"""Block size -> published decay of its weights (arXiv 2602.06036)."""


def default_gamma(block_size: int) -> float:
    """Decay of exp(-k / gamma) for a block: the published value of the nearest size."""
    return min(GAMMAS, key=lambda pair: abs(pair[0] - block_size))[1]


def exponential_weights(steps: int, gamma: float) -> list[float]:
    """exp(-k / gamma) for every step k."""
    return [math.exp(-k / gamma) for k in range(steps)]


def pace_weights(q_PT: Tensor, supervised_PT: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [P, T]: contribution of a step's acceptance to the accepted length.

    With q~ = (1 - alpha) q + alpha and prefix_k = q~_0 .. q~_k, the weight of step k is the sum of prefix_m over the
    supervised steps m >= k.

    Args:
        q_PT: the draft's probability of the label token, without gradient.
    """
    # steps first: a GPU scans few columns per row slowly
    supervised_TP = supervised_PT.t().contiguous()
    prefix_TP = ((1 - alpha) * q_PT.t().contiguous() + alpha).cumprod(0) * supervised_TP
    return (prefix_TP.flip(0).cumsum(0).flip(0) * supervised_TP).t()


def label_probabilities(
    logits_RD: Tensor,
    teacher: Teacher,
    rows_R: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    kernels: Any = None,
    known: Largest | None = None,
) -> Tensor:
    """[R] the draft's probability of `teacher.label_U` at each row, in fp32 or fp64; 0 where `teacher.in_vocab_U` is
    false: the draft vocabulary lacks the token.

    Args:
        logits_RD: draft logits of this rank's shard, in any dtype; they stay as they are.
        kernels: operators (`ops.backend.load`), to find the log-sum-exp in one pass.
        known: of this rank's columns, if the product found it.
    """
    if kernels is None:
        wide_RD = logits_RD.to(torch.promote_types(logits_RD.dtype, torch.float32))
        lse_R = argmax_and_lse(wide_RD / temperature, group, 0)[1]
    else:
        lse_R = kernel_largest(logits_RD, 0, temperature, group, kernels, known)[0]
    label_R = pick(logits_RD, teacher.label_U[rows_R] - teacher.first)[2].to(lse_R.dtype) / temperature
    reduce_together(group, label_R)
    return torch.where(teacher.in_vocab_U[rows_R], (label_R - lse_R).exp(), 0)


def ce_l1_rows(
    draft_RD: Tensor,
    teacher: Teacher,
    rows_R: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    weights: tuple[float, float],
) -> RowLosses:
    """DSpark: a * cross-entropy to `teacher.label_U` + b * sum_v |q - p| with (a, b) = `weights`.

    Args:
        draft_RD: fp32 (or fp64) draft logits of this rank's shard; the buffer is overwritten.
    """
    a, b = weights
    argmax_R, logq_RD, logp_RD = log_probabilities(draft_RD, teacher, rows_R, temperature, group)
    p_RD = logp_RD.exp_()
    column, mine, value_R = pick(logq_RD, teacher.label_U[rows_R] - teacher.first)
    q_RD = logq_RD.exp_()
    below = (q_RD < p_RD).to(q_RD.dtype)
    overlap_R, mass_R = torch.minimum(p_RD, q_RD).sum(-1), torch.linalg.vecdot(q_RD, below)
    reduce_together(group, overlap_R, mass_R, value_R)
    grad_RD = q_RD.mul_(below.neg_().add_(mass_R[:, None]).mul_(2 * b).add_(a))
    grad_RD.scatter_add_(-1, column, mine[:, None].to(grad_RD.dtype) * -a)
    if temperature != 1:
        grad_RD.div_(temperature)
    return RowLosses(2 * b * (1 - overlap_R) - a * value_R, overlap_R, argmax_R, grad_RD)


def confidence_losses(logit_R: Tensor, overlap_R: Tensor) -> Tensor:
    """[R] binary cross-entropy between the confidence and the acceptance probability 1 - TV = sum_v min(p, q)."""
    return F.binary_cross_entropy_with_logits(logit_R, overlap_R.clamp(0, 1), reduction="none")
