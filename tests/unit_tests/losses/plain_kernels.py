"""What `megatron_spec.ops.kernels.loss` computes on one rank's shard of the vocabulary, in plain tensors.

R rows, D this rank's shard of the draft vocabulary, U teacher rows.
"""

from __future__ import annotations

from torch import Tensor


def largest(logits_RD: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    u_RD = logits_RD / temperature
    return u_RD.amax(1), u_RD.logsumexp(1), u_RD.argmax(1)


def soft_shard(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, weight_R: Tensor, lse_R: Tensor,
    temperature: float, kl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logq = logits_RD / temperature - lse_R[:, None]
    logp = teacher_UD[rows_R] / temperature - teacher_lse_U[rows_R, None]
    p, q = logp.exp(), logq.exp()
    logits_RD.copy_((q - p) * weight_R[:, None] / temperature)
    return (p * (logp - logq) if kl else -p * logq).sum(1), p.minimum(q).sum(1)
