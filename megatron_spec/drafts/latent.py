"""Multi-head latent attention in a draft layer of the base's architecture (DeepSeek-V3, arXiv 2412.19437, 2.1.1).

Parameters have DeepSeek's names. Values are narrower than keys: they are zero-padded for attention, and the output is
truncated.

S sequence, B batch, H hidden, N heads of this rank, D = nope + rope sizes of a query or key head, V of a value.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import EagleConfig, MlaConfig
from megatron_spec.drafts.contract import Attention
from megatron_spec.drafts.linear import ColumnLinear, Linear, Placement, RMSNorm, RowLinear, enter
from megatron_spec.ops.latent import LATENT_EPS, expand


class LatentAttention(nn.Module):
    """Replaces `layer.SelfAttention`."""

    def __init__(self, config: EagleConfig, mla: MlaConfig, place: Placement) -> None:
        super().__init__()
        self.mla, self.group, self.sequence_parallel = mla, place.group, place.sequence_parallel
        self.rotary_factor = config.rope.attention_factor
        heads, H, what = config.num_attention_heads, config.hidden_size, "draft num_attention_heads"
        self.num_kv_heads = place.divide(heads, what)
        self.head_dim = mla.nope_head_dim + mla.rope_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = ColumnLinear(H, heads * self.head_dim, what, place)
        else:
            self.q_a_proj = Linear(H, mla.q_lora_rank, place)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_EPS, place)
            self.q_b_proj = ColumnLinear(mla.q_lora_rank, heads * self.head_dim, what, place)
        self.kv_a_proj_with_mqa = Linear(H, mla.kv_lora_rank + mla.rope_head_dim, place)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_EPS, place)
        self.kv_b_proj = ColumnLinear(mla.kv_lora_rank, heads * (mla.nope_head_dim + mla.v_head_dim), what, place)
        self.o_proj = RowLinear(heads * mla.v_head_dim, H, what, place)

    def forward(self, x_SBH: Tensor, cos_SB1D: Tensor, sin_SB1D: Tensor, attention: Attention, layer: int) -> Tensor:
        """[S, B, H] -> [S, B, H]; both [S / TP, ...] under sequence parallelism."""
        mla, factor = self.mla, self.rotary_factor
        q = self._heads(self._queries(x_SBH))
        latent, k_rotary = self.kv_a_proj_with_mqa(x_SBH).split([mla.kv_lora_rank, mla.rope_head_dim], -1)
        kv = self._heads(self.kv_b_proj(self._enter(self.kv_a_layernorm(latent))))
        query, key, value = expand(q, self._enter(k_rotary), kv, mla, cos_SB1D * factor, sin_SB1D * factor)
        query = query * mla.score_factor
        out = self._heads(attention(layer, query, key, F.pad(value, (0, self.head_dim - mla.v_head_dim))))
        projected: Tensor = self.o_proj(out[..., : mla.v_head_dim].flatten(2))
        return projected

    def _enter(self, x: Tensor) -> Tensor:
        return enter(x, self.group, self.sequence_parallel)

    def _heads(self, x_SBX: Tensor) -> Tensor:
        return x_SBX.unflatten(-1, (self.num_kv_heads, -1))

    def _queries(self, x_SBH: Tensor) -> Tensor:
        if self.mla.q_lora_rank is None:
            return self.q_proj(self._enter(x_SBH))  # type: ignore[no-any-return]
        return self.q_b_proj(self._enter(self.q_a_layernorm(self.q_a_proj(x_SBH))))  # type: ignore[no-any-return]
