"""Plain twins of `ops.kernels.experts`.

R rows (tokens), K experts per token, P = R * K choices, E experts of this rank, H hidden, W width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.config import MoeConfig
from megatron_spec.ops.moe import choose, gated


def choose_experts(logits_RE: Tensor, moe: MoeConfig, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """`kernels.experts.choose_experts`."""
    return choose(logits_RE, moe, bias_E)


def sort_rows(x_RH: Tensor, chosen_RK: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.experts.sort_rows`."""
    K, device = chosen_RK.shape[1], x_RH.device
    index_P = chosen_RK.flatten().long() - first
    here_P = (index_P >= 0) & (index_P < count)
    sorted_P, order_P = torch.where(here_P, index_P, count).sort(stable=True)
    ends_E = torch.searchsorted(sorted_P, torch.arange(1, count + 1, device=device)).int()
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=device))
    return x_RH[order_P // K], torch.where(here_P, place_P, -1).int().view(chosen_RK.shape), ends_E


def gate_rows(x_PX: Tensor, ends_E: Tensor, bias_EX: Tensor | None, clamp: float, alpha: float) -> Tensor:
    """`kernels.experts.gate_rows`."""
    if bias_EX is not None:
        rows_P = torch.arange(len(x_PX), device=x_PX.device)
        expert_P = torch.searchsorted(ends_E.long(), rows_P, right=True)
        x_PX = x_PX + bias_EX[expert_P.clamp(max=len(ends_E) - 1)]
    return gated(x_PX, clamp, alpha)


def mix_rows(
    x_PH: Tensor, place_RK: Tensor, weights_RK: Tensor, chosen_RK: Tensor, first: int, bias_EH: Tensor | None
) -> Tensor:
    """`kernels.experts.mix_rows`."""
    none_RK = place_RK < 0
    x_RKH = x_PH[place_RK.clamp(min=0).long()]
    if bias_EH is not None:
        x_RKH = x_RKH + bias_EH[torch.where(none_RK, 0, chosen_RK - first).long()]
    x_RKH = x_RKH.masked_fill(none_RK[..., None], 0)  # rows of no expert are not written
    return torch.bmm(weights_RK[:, None].to(x_PH.dtype), x_RKH)[:, 0]
