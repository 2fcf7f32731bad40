"""Every loss in one readable line, on whole rows of logits; `vocab_parallel` computes them shard by shard.

p is the teacher's distribution over the draft vocabulary, q the draft's; R rows, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def soft_ce(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """- sum_v p log q."""
    return -(logp_RD.exp() * logq_RD).sum(-1)


def kl(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """sum_v p log(p / q): the cross-entropy minus the teacher's entropy; the same gradient."""
    return (logp_RD.exp() * (logp_RD - logq_RD)).sum(-1)


def reverse_kl(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """sum_v q log(q / p)."""
    return (logq_RD.exp() * (logq_RD - logp_RD)).sum(-1)


def overlap(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """sum_v min(p, q): the probability that speculative sampling accepts a token of q (arXiv 2302.01318)."""
    return logp_RD.minimum(logq_RD).exp().sum(-1)


def tv(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """Total variation, 1/2 sum_v |p - q| = 1 - overlap."""
    return (logp_RD.exp() - logq_RD.exp()).abs().sum(-1) / 2


def lk(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """Negative log acceptance rate, - log sum_v min(p, q)."""
    return -logp_RD.minimum(logq_RD).logsumexp(-1)


HYBRID_ETA = 3.0
"""Of `lk_hybrid`, as published."""


def lk_hybrid(logp_RD: Tensor, logq_RD: Tensor) -> Tensor:
    """w KL + (1 - w) TV with w = exp(-3 overlap), which has no gradient (arXiv 2602.23881)."""
    w = (-HYBRID_ETA * overlap(logp_RD, logq_RD)).exp().detach()
    return w * kl(logp_RD, logq_RD) + (1 - w) * tv(logp_RD, logq_RD)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_ce": soft_ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def row_loss(kind: str, teacher_RD: Tensor, draft_RD: Tensor, labels_R: Tensor, temperature: float = 1.0) -> Tensor:
    """Loss of every row, from logits. `hard_ce` is -log q of the label; all other losses compare with the teacher."""
    logp, logq = (teacher_RD / temperature).log_softmax(-1), (draft_RD / temperature).log_softmax(-1)
    if kind == "hard_ce":
        return -logq.gather(-1, labels_R[:, None])[:, 0]
    return LOSSES[kind](logp, logq)
