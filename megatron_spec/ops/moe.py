"""Routing of a mixture of experts, shared by base and draft: experts of every token, rows of every expert.

E experts, K experts per token, R rows (tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def mixed_by_groups(
    x_RH: Tensor,
    weights_P: Tensor,
    chosen_RK: Tensor,
    first: int,
    enter_EMH: Tensor,
    leave_EHM: Tensor,
    gated: Callable[[Tensor], Tensor],
    biases: tuple[Tensor, Tensor | None] | None = None,
    complete: bool = False,
) -> Tensor:
    """[R, H] the same as `mixed`, with two products for all experts and no synchronisation with the device.

    Args:
        enter_EMH, leave_EHM: matrices of this rank's experts, those from `first` on; M as `gated` takes and returns it.
        gated: activation of the rows of any expert.
        biases: [E, M] and [E, H] (None: left to another rank); None: the experts have none.
        complete: these are all experts that a token may choose.
    """
    R, K = chosen_RK.shape
    count = len(enter_EMH)
    # Choices of this rank's experts come first; the others follow in one group that is not multiplied.
    index_P = (chosen_RK.flatten() - first).long()
    index_P = torch.where((index_P >= 0) & (index_P < count), index_P, count)
    sorted_P, order_P = index_P.sort(stable=True)
    ends_E = torch.searchsorted(sorted_P, torch.arange(1, count + 1, device=x_RH.device)).int()
    rows_PM = F.grouped_mm(x_RH[order_P // K], enter_EMH.transpose(1, 2), offs=ends_E)
    enter_bias, leave_bias = biases or (None, None)
    expert_P = sorted_P if complete else sorted_P.clamp(max=count - 1)
    if enter_bias is not None:
        rows_PM = rows_PM + enter_bias[expert_P]
    rows_PH = F.grouped_mm(gated(rows_PM), leave_EHM.transpose(1, 2), offs=ends_E)
    if leave_bias is not None:
        rows_PH = rows_PH + leave_bias[expert_P]
    if not complete:
        rows_PH.masked_fill_(sorted_P[:, None] == count, 0)  # rows of no group are not written
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(R * K, device=x_RH.device))
    return torch.bmm(weights_P.view(R, 1, K), rows_PH[place_P].view(R, K, -1))[:, 0]
