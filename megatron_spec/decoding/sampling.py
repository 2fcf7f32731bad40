"""Sampling from vocab-parallel logits; the vocabulary is gathered over tensor parallel ranks only where noted.

N rows, V vocabulary (this rank holds V / TP consecutive entries of every row), TP tensor parallel size.
Every function returns the same values on all ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[TP, *x.shape], in rank order."""
    if group.size() == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


def argmax(logits_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """int64 [N] ids of the largest logit over the whole vocabulary; the lowest id on ties.

    Each rank sends one (value, id) pair per row. float64 holds both exactly.
    """
    value_N, id_N = logits_NV.max(dim=-1)
    if group.size() == 1:
        return id_N
    id_N = id_N + group.rank() * logits_NV.shape[-1]
    pairs_TN2 = _gather(torch.stack([value_N.double(), id_N.double()], dim=-1), group)
    best_N = pairs_TN2[..., 0].argmax(dim=0)  # ties: the lowest rank
    return pairs_TN2[best_N, torch.arange(best_N.numel(), device=best_N.device), 1].long()


def topk(logits_NV: Tensor, k: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Values [N, k] (descending) and int64 ids [N, k] of the k largest logits over the whole vocabulary."""
    value_Nk, id_Nk = logits_NV.float().topk(k, dim=-1)
    id_Nk = id_Nk + group.rank() * logits_NV.shape[-1]
    values = torch.cat(list(_gather(value_Nk, group)), dim=-1)
    ids = torch.cat(list(_gather(id_Nk, group)), dim=-1)
    top_Nk, where_Nk = values.topk(k, dim=-1)
    return top_Nk, ids.gather(-1, where_Nk)


def sample(
    logits_NV: Tensor, uniform_N: Tensor, temperature: float, group: dist.ProcessGroup, kernels: Any = None
) -> Tensor:
    """int64 [N] ids sampled from softmax(logits / temperature) by inverse transform sampling.

    The token is a function of the logits and of one uniform number in [0, 1) per row, so equal numbers give equal text
    for any batch, draft and tensor parallel size (up to rounding at the edge of an interval). A row with NaN gives any
    token of the vocabulary, as `argmax` does: an id outside would be read from the embedding.

    Args:
        kernels: operators (`ops.backend.load`) that read the logits by chunks and write nothing of their size.
    """
    if kernels is not None:
        return _sample_by_chunks(logits_NV, uniform_N, temperature, group, kernels)
    scaled_NV = logits_NV.float() / temperature
    top_N = _gather(scaled_NV.amax(dim=-1), group).amax(dim=0)
    # The copy of the logits is reused: a large vocabulary costs as much to write as a small base to run.
    cumulative_NV = scaled_NV.sub_(top_N[:, None]).exp_().double().cumsum_(dim=-1)
    owner_N, inside_N1 = _owner(cumulative_NV[:, -1], uniform_N, group)
    inside_N1 = torch.searchsorted(cumulative_NV, inside_N1, right=True)
    id_N = torch.minimum(inside_N1, _last(cumulative_NV))[:, 0] + group.rank() * logits_NV.shape[-1]
    return _gather(id_N, group).gather(0, owner_N[None])[0]


def _owner(mass_N: Tensor, uniform_N: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(rank that has the sampled token [N], mass of its logits before it [N, 1]), from each rank's mass."""
    mass_TN = _gather(mass_N, group)
    edges_TN = mass_TN.cumsum(dim=0)
    target_N = uniform_N.double() * edges_TN[-1]
    owner_N = (target_N >= edges_TN[:-1]).sum(dim=0)
    below_N = (edges_TN - mass_TN).gather(0, owner_N[None])[0]
    return owner_N, (target_N - below_N)[:, None]


def _sample_by_chunks(
    logits_NV: Tensor, uniform_N: Tensor, temperature: float, group: dist.ProcessGroup, kernels: Any
) -> Tensor:
    """`sample`: a chunk by the chunks' masses, then a token in it."""
    top_N = _gather(logits_NV.amax(dim=-1).float() / temperature, group).amax(dim=0)
    mass_NC = kernels.chunk_masses(logits_NV, top_N, temperature)
    cumulative_NC = mass_NC.cumsum(dim=-1)
    owner_N, inside_N1 = _owner(cumulative_NC[:, -1], uniform_N, group)
    chunk_N1 = torch.minimum(torch.searchsorted(cumulative_NC, inside_N1, right=True), _last(cumulative_NC))
    rest_N1 = (inside_N1 - (cumulative_NC - mass_NC).gather(1, chunk_N1)).clamp(min=0.0)
    id_N = kernels.find_in_chunk(logits_NV, top_N, temperature, chunk_N1[:, 0], rest_N1[:, 0])
    return _gather(id_N + group.rank() * logits_NV.shape[-1], group).gather(0, owner_N[None])[0]


def _last(cumulative_NV: Tensor) -> Tensor:
    """int64 [N, 1] last entry with nonzero probability: rounding may put a target past it. Of NaN: the last one."""
    found_N1 = torch.searchsorted(cumulative_NV, cumulative_NV[:, -1:].contiguous())
    return found_N1.clamp(max=cumulative_NV.shape[-1] - 1)


def likely(scaled_NV: Tensor, top_k: int, top_p: float, group: dist.ProcessGroup) -> Tensor:
    """Logits masked with -inf outside the top_k (0: no limit), then outside the nucleus of probability top_p.

    Ties with the last kept token are kept. Gathers the vocabulary, so for decoding only.
    """
    if not top_k and top_p == 1.0:
        return scaled_NV
    whole_NV = torch.cat(list(_gather(scaled_NV.float(), group)), dim=-1)
    sorted_NV = whole_NV.sort(dim=-1, descending=True).values
    last_N1 = sorted_NV[:, min(top_k or sorted_NV.shape[1], sorted_NV.shape[1]) - 1, None]
    if top_p < 1.0:
        p_NV = sorted_NV.masked_fill(sorted_NV < last_N1, float("-inf")).double().softmax(dim=-1)
        count_N1 = (p_NV.cumsum(dim=-1) - p_NV < top_p).sum(dim=-1, keepdim=True)
        last_N1 = torch.maximum(last_N1, sorted_NV.gather(-1, count_N1 - 1))
    return scaled_NV.masked_fill(scaled_NV < last_N1, float("-inf"))


def probabilities(scaled_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """float32 softmax [N, V] over the whole vocabulary, equal on all ranks. Gathers it, so for decoding only."""
    return torch.cat(list(_gather(scaled_NV.float(), group)), dim=-1).softmax(dim=-1)


def draw(p_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """int64 [N] ids sampled from unnormalised nonzero distributions over the whole vocabulary.

    Args:
        uniform_N: one random number in [0, 1) per row.
    """
    cumulative_NV = p_NV.double().cumsum(dim=-1)
    target_N1 = uniform_N.double()[:, None] * cumulative_NV[:, -1:]
    id_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)
    return torch.minimum(id_N1, _last(cumulative_NV))[:, 0]


def log_normalizer(logits_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """float32 [N] logsumexp of the logits over the whole vocabulary."""
    return _gather(logits_NV.float().logsumexp(dim=-1), group).logsumexp(dim=0)


def top_log_probs(logits_NV: Tensor, k: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """log-probabilities [N, k] (descending, at most 0) and int64 ids [N, k] of the k most likely tokens."""
    top_Nk, ids_Nk = topk(logits_NV, k, group)
    return (top_Nk - log_normalizer(logits_NV, group)[:, None]).clamp(max=0.0), ids_Nk


def entropy(logits_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """float32 [N] entropy in nats of softmax(logits)."""
    total_N = log_normalizer(logits_NV, group)
    logp_NV = logits_NV.float() - total_N[:, None]
    part_NV = torch.where(logp_NV.isfinite(), logp_NV.exp() * logp_NV, 0.0)
    return -_gather(part_NV.sum(dim=-1), group).sum(dim=0)


def at(logits_NV: Tensor, ids_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """float32 [N] logit of one token per row."""
    width = logits_NV.shape[-1]
    place_N = ids_N - group.rank() * width
    mine_N = (place_N >= 0) & (place_N < width)
    value_N = logits_NV.float().gather(1, place_N.clamp(0, width - 1)[:, None])[:, 0]
    return _gather(torch.where(mine_N, value_N, float("-inf")), group).amax(dim=0)
