"""Mixture of experts in a draft layer of the base's architecture (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Parameters have DeepSeek's names. Every tensor parallel rank has a shard of every expert; there is no expert
parallelism, as the draft is data parallel over all other ranks. The router's bias for load balancing, which has no
gradient, keeps the base's values.

S sequence, B batch, H hidden, E experts, K experts per token, R rows (tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

from megatron_spec.config import EagleConfig, MoeConfig
from megatron_spec.drafts.linear import ColumnLinear, Placement, RowLinear, enter
from megatron_spec.ops.moe import choose, mixed


class Router(nn.Module):
    """Expert scores in fp32."""

    def __init__(self, moe: MoeConfig, hidden: int, place: Placement) -> None:
        super().__init__()
        self.moe = moe
        self.weight = place.replicated(moe.num_experts, hidden)
        bias = place.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = bias.requires_grad_(False) if moe.choice_bias else None

    def forward(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [S, B, K], chosen experts [S, B, K])."""
        dtype = torch.promote_types(x_SBH.dtype, torch.float32)
        return choose(F.linear(x_SBH.to(dtype), self.weight.to(dtype)), self.moe, self.e_score_correction_bias)


class PartialLinear(RowLinear):
    """A `RowLinear` that leaves the sum over ranks to the caller, for all experts at once."""

    def forward(self, x: Tensor) -> Tensor:
        """[R, in / TP] -> this rank's partial sum of [R, out]."""
        return self.product(x)


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)) on this rank's shard."""

    def __init__(self, hidden: int, width: int, place: Placement) -> None:
        super().__init__()
        what = "width of the draft's experts"
        self.gate_proj = ColumnLinear(hidden, width, what, place)
        self.up_proj = ColumnLinear(hidden, width, what, place)
        self.down_proj = PartialLinear(width, hidden, what, place)

    def forward(self, x_RH: Tensor) -> Tensor:
        """This rank's partial sum of [R, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_RH)) * self.up_proj(x_RH))
        return out


class MixtureOfExperts(nn.Module):
    """Replaces `layer.GatedMLP`."""

    def __init__(self, config: EagleConfig, moe: MoeConfig, place: Placement) -> None:
        super().__init__()
        H = config.hidden_size
        self.group, self.sequence_parallel = place.group, place.sequence_parallel
        self.gate = Router(moe, H, place)
        self.experts = nn.ModuleList(Expert(H, moe.intermediate_size, place) for _ in range(moe.num_experts))
        shared = moe.shared_intermediate_size
        self.shared_experts = Expert(H, shared, place) if shared else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]; [S / TP, B, H] under sequence parallelism."""
        weights_SBK, chosen_SBK = self.gate(x_SBH)
        x = enter(x_SBH, self.group, self.sequence_parallel)
        # Each rank weights its partial sum of an expert's output, so gradients of the weights are summed over ranks.
        weights = enter(weights_SBK, self.group, self.sequence_parallel).flatten().to(x.dtype)
        if self.sequence_parallel:
            chosen_SBK = mappings.gather_from_sequence_parallel_region(chosen_SBK, group=self.group)
        x_RH = x.flatten(0, 1)
        out_RH = mixed(x_RH, weights, chosen_SBK.flatten(0, 1), self.experts)
        if self.shared_experts is not None:
            out_RH = out_RH + self.shared_experts(x_RH)
        out = out_RH.view(x.shape)
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.group)  # type: ignore[no-any-return]
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self.group)  # type: ignore[no-any-return]
