"""Plain twins of `ops.kernels.loss`.

R rows, D this rank's shard of the draft vocabulary, U teacher rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.ops.fp8 import Fp8Matrix
from megatron_spec.ops.plain.fp8 import quantize


def largest(logits_RD: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.loss.largest`."""
    u_RD = logits_RD / temperature
    return u_RD.amax(1), u_RD.logsumexp(1), u_RD.argmax(1)


def soft_shard(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, weight_R: Tensor, lse_R: Tensor,
    temperature: float, kl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.soft_shard`."""
    logq = logits_RD / temperature - lse_R[:, None]
    logp = teacher_UD[rows_R] / temperature - teacher_lse_U[rows_R, None]
    p, q = logp.exp(), logq.exp()
    logits_RD.copy_((q - p) * weight_R[:, None] / temperature)
    return (p * (logp - logq) if kl else -p * logq).sum(1), p.minimum(q).sum(1)


def soft_rows(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, weight_R: Tensor, temperature: float,
    kl: bool, rounded: Fp8Matrix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.soft_rows`."""
    _, lse_R, best_R = largest(logits_RD, temperature)
    given = (teacher_UD, teacher_lse_U, rows_R, weight_R)
    loss_R, overlap_R = soft_shard(logits_RD, *given, lse_R, temperature, kl)
    if rounded is not None:
        found = quantize(logits_RD)
        rounded.values.copy_(found.values)
        rounded.scale.copy_(found.scale)
    return loss_R, overlap_R, best_R


def _probabilities(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, lse_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    q_RD = (logits_RD / temperature - lse_R[:, None]).exp()
    return q_RD, (teacher_UD[rows_R] / temperature - teacher_lse_U[rows_R, None]).exp()


def _columns(rows_R: Tensor, column_U: Tensor, D: int) -> Tensor:
    """[R, D] True at the label of each row."""
    return torch.arange(D, device=rows_R.device)[None] == column_U[rows_R, None]


def mixed_sums(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, lse_R: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.mixed_sums`."""
    q, p = _probabilities(logits_RD, teacher_UD, teacher_lse_U, rows_R, lse_R, temperature)
    logq = logits_RD / temperature - lse_R[:, None]
    label_R = (logq * _columns(rows_R, column_U, logits_RD.shape[1])).sum(1)
    return label_R, p.minimum(q).sum(1), (q * (q < p)).sum(1)


def mixed_gradient(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, weight_R: Tensor,
    lse_R: Tensor, mass_R: Tensor, temperature: float, weights: tuple[float, float],
) -> None:  # fmt: skip
    """`kernels.loss.mixed_gradient`."""
    a, b = weights
    q, p = _probabilities(logits_RD, teacher_UD, teacher_lse_U, rows_R, lse_R, temperature)
    label = _columns(rows_R, column_U, logits_RD.shape[1])
    gradient = a * (q - label.to(q.dtype)) + 2 * b * q * (mass_R[:, None] - (q < p).to(q.dtype))
    logits_RD.copy_(gradient * weight_R[:, None] / temperature)


def mixed_rows(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, weight_R: Tensor,
    temperature: float, weights: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.mixed_rows`."""
    _, lse_R, best_R = largest(logits_RD, temperature)
    given = (teacher_UD, teacher_lse_U, rows_R, column_U)
    label_R, overlap_R, mass_R = mixed_sums(logits_RD, *given, lse_R, temperature)
    mixed_gradient(logits_RD, *given, weight_R, lse_R, mass_R, temperature, weights)
    return 2 * weights[1] * (1 - overlap_R) - weights[0] * label_R, overlap_R, best_R
