"""Routing of a mixture of experts, shared by base and draft: experts of every token, rows of every expert.

E experts, K experts per token, R rows (tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import MoeConfig
from megatron_spec.runtime.platform import to_device


def choose(logits_RE: Tensor, moe: MoeConfig, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights [R, K], indices of the experts [R, K]) of every token, from the router's logits.

    softmax: Mixtral, Qwen 3. softmax_of_chosen: gpt-oss. sigmoid: DeepSeek-V3 (arXiv 2412.19437, equations 12-16): the
    choice is by score + bias inside the groups with the best two scores, the weight is the score.
    """
    if moe.router == "softmax_of_chosen":
        best_RK, chosen_RK = logits_RE.topk(moe.experts_per_token, dim=-1)
        return best_RK.softmax(-1), chosen_RK
    scores_RE = logits_RE.float().sigmoid() if moe.router == "sigmoid" else logits_RE.float().softmax(-1)
    ranked_RE = scores_RE if bias_E is None else scores_RE + bias_E
    if moe.groups > 1:
        groups = ranked_RE.unflatten(-1, (moe.groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(moe.groups_per_token, dim=-1).indices
        outside = torch.ones(groups.shape[:-1], dtype=torch.bool, device=best.device).scatter(-1, best, False)
        ranked_RE = groups.masked_fill(outside[..., None], float("-inf")).flatten(-2)
    chosen_RK = ranked_RE.topk(moe.experts_per_token, dim=-1).indices
    weights_RK = scores_RE.gather(-1, chosen_RK)
    if moe.normalize:
        weights_RK = weights_RK / (weights_RK.sum(-1, keepdim=True) + (1e-20 if moe.router == "sigmoid" else 0.0))
    return weights_RK * moe.scale, chosen_RK


def rows_of_experts(chosen_RK: Tensor, first: int, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert index relative to `first`, its rows, their positions in the flattened [R * K] choices).

    Covers experts first .. first + count - 1 that have rows. Takes one sort and one device synchronisation.
    """
    expert_of = chosen_RK.flatten()
    order = expert_of.argsort(stable=True)
    sizes = torch.bincount(expert_of, minlength=first + count).tolist()
    at = sum(sizes[:first])
    for index, size in enumerate(sizes[first : first + count]):
        if size:
            pairs = order[at : at + size]
            yield index, pairs // chosen_RK.shape[1], pairs
        at += size


def mixed(x_RH: Tensor, weights_P: Tensor, chosen_RK: Tensor, experts: nn.ModuleList, first: int = 0) -> Tensor:
    """[R, H] weighted sums of the experts' outputs.

    Args:
        weights_P: weights of the flattened [R * K] choices.
        experts: experts of this rank, with indices from `first`.
    """
    out_RH = torch.zeros_like(x_RH)
    for index, rows, pairs in rows_of_experts(chosen_RK, first, len(experts)):
        out_RH.index_add_(0, rows, experts[index](x_RH[rows]) * weights_P[pairs, None])
    return out_RH


def mixed_in_order(
    x_RH: Tensor, weights_P: Tensor, chosen_RK: Tensor, first: int, count: int,
    experts: Callable[[Tensor, list[int]], Tensor], multiple: int = 1,
) -> Tensor:  # fmt: skip
    """[R, H] the same as `mixed`, with one call for all experts on rows in their order; one device synchronisation.

    Args:
        experts: (rows [P, H], rows of each expert first .. first + count - 1) -> [P, H].
        multiple: every expert's rows are filled up with zeros to a multiple of it, which fp8 products need.
    """
    expert_P = chosen_RK.flatten()
    order = expert_P.argsort(stable=True)
    sizes = torch.bincount(expert_P, minlength=first + count).tolist()
    begin, sizes = sum(sizes[:first]), sizes[first : first + count]
    total = sum(sizes)
    if total == 0:
        return torch.zeros_like(x_RH)
    pairs = order[begin : begin + total]
    rows = pairs // chosen_RK.shape[1]
    filled = [-(-size // multiple) * multiple for size in sizes]
    if filled == sizes:
        rows_PH = experts(x_RH[rows], sizes)
    else:
        gaps = [f - s for f, s in zip(filled, sizes, strict=True)]
        before = [sum(gaps[:i]) for i in range(count)]
        shift = torch.repeat_interleave(torch.tensor(before), torch.tensor(sizes)) + torch.arange(total)
        places = to_device(shift, x_RH.device)
        wide = x_RH.new_zeros(sum(filled), x_RH.shape[1]).index_copy_(0, places, x_RH[rows])
        rows_PH = experts(wide, filled)[places]
    every_PH = x_RH.new_zeros(len(expert_P), x_RH.shape[1]).index_copy_(0, pairs, rows_PH * weights_P[pairs, None])
    return every_PH.view(*chosen_RK.shape, -1).sum(1)


def gated(gate_up: Tensor, clamp: float, alpha: float) -> Tensor:
    """silu(gate) * up of [..., 2 * width]; with a clamp gpt-oss's (see `MoeConfig`)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if not clamp:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


class Stacked(NamedTuple):
    """All experts of this rank, those from `first` on."""

    first: int
    enter_EXH: Tensor
    """[E, 2 * width, H]."""
    leave_EHW: Tensor
    biases: tuple[Tensor, Tensor | None] | None
    """[E, 2 * width] and [E, H] (None: left to another rank); None: the experts have none."""
    clamp: float
    alpha: float


def mixed_by_groups(x_RH: Tensor, weights_RK: Tensor, chosen_RK: Tensor, experts: Stacked, kernels: Any) -> Tensor:
    """[R, H] the same as `mixed`, with two products for all experts and no synchronisation with the device.

    Args:
        kernels: operators (`ops.backend.load`).
    """
    if len(x_RH) == 0:
        return torch.zeros_like(x_RH)
    enter_bias, leave_bias = experts.biases or (None, None)
    rows_PH, place_RK, ends_E = kernels.sort_rows(x_RH, chosen_RK, experts.first, len(experts.enter_EXH))
    rows_PX = F.grouped_mm(rows_PH, experts.enter_EXH.transpose(1, 2), offs=ends_E)
    del rows_PH  # frees memory before the next is allocated
    rows_PW = kernels.gate_rows(rows_PX, ends_E, enter_bias, experts.clamp, experts.alpha)
    del rows_PX
    rows_PH = F.grouped_mm(rows_PW, experts.leave_EHW.transpose(1, 2), offs=ends_E)
    out_RH: Tensor = kernels.mix_rows(rows_PH, place_RK, weights_RK, chosen_RK, experts.first, leave_bias)
    return out_RH
