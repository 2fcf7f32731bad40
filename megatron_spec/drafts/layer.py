"""Decoder layer of a draft: a Llama layer; the first layer also reads the token embedding (EAGLE-3).

With `config.mla` and `config.moe` it is a layer of the base's architecture instead (the base's own MTP module).

S sequence, B batch, H draft hidden size, N query heads and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

from megatron_spec.config import BlockConfig, EagleConfig
from megatron_spec.drafts.contract import Attention, mark_replicated
from megatron_spec.drafts.experts import MixtureOfExperts
from megatron_spec.drafts.few_rows import FewRows
from megatron_spec.drafts.latent import LatentAttention
from megatron_spec.drafts.linear import ColumnLinear, Placement, RMSNorm, RowLinear, copy_to_ranks, enter
from megatron_spec.ops.fused_layer import FusedLayer
from megatron_spec.ops.rope import apply_rotary
from megatron_spec.ops.rows import pick_rows

LayerConfig = EagleConfig | BlockConfig
Rotation = tuple[Tensor, Tensor]
"""(cos, sin) of the rows' positions."""


def local_kv_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> list[int]:
    """Indices of the key/value heads that the query heads of one rank read, in order.

    One entry per query head if the rank's query heads are unevenly distributed over them.
    """
    per_rank, group = num_heads // tp_size, num_heads // num_kv_heads
    needed = [n // group for n in range(tp_rank * per_rank, (tp_rank + 1) * per_rank)]
    distinct = sorted(set(needed))
    even = all(needed.count(g) * len(distinct) == per_rank for g in distinct)
    return distinct if even else needed


def rotate(x_SBND: Tensor, cos_SB1D: Tensor, sin_SB1D: Tensor) -> Tensor:
    """Apply the rotary embedding to the first dimensions of each head, as many as cos and sin have."""
    size = cos_SB1D.shape[-1]
    if size == x_SBND.shape[-1]:
        return apply_rotary(x_SBND, cos_SB1D, sin_SB1D)
    return torch.cat([apply_rotary(x_SBND[..., :size], cos_SB1D, sin_SB1D), x_SBND[..., size:]], dim=-1)


class HeadNorm(nn.Module):
    """RMSNorm over each head. A rank has only its own heads, so the weight gradient is summed over ranks here."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = mark_replicated(place.empty(size), sequence_parallel=False)
        self.eps, self.group = eps, place.group

    def own_weight(self) -> Tensor:
        """The weight, whose gradient by this rank's heads is summed over ranks."""
        return copy_to_ranks(self.weight, self.group)

    def forward(self, x_SBND: Tensor) -> Tensor:
        """Same shape and dtype."""
        return F.rms_norm(x_SBND, (x_SBND.shape[-1],), self.own_weight(), self.eps)


class SelfAttention(nn.Module):
    """q, k, v projections, rotary embedding, the attention passed to `forward`, output projection."""

    def __init__(self, config: LayerConfig, inputs: int, place: Placement) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        group = place.group
        place.divide(heads, "draft num_attention_heads")
        self.group, self.sequence_parallel = group, place.sequence_parallel
        what = "draft num_key_value_heads * head_dim"
        bias, queries = config.attention_bias, heads * self.head_dim
        self.q_proj = ColumnLinear(inputs, queries, "draft query size", place, bias)
        self.k_proj = ColumnLinear(inputs, kv_heads * self.head_dim, what, place, bias)
        self.v_proj = ColumnLinear(inputs, kv_heads * self.head_dim, what, place, bias)
        self.o_proj = RowLinear(queries, config.hidden_size, "draft query size", place, bias)
        self.q_norm: Any = None
        self.k_norm: Any = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(self.head_dim, config.rms_norm_eps, place) for _ in range(2))
        # With fewer key/value heads than ranks, slices are projected and gathered, and each rank selects its heads.
        self.picked = None
        if kv_heads % group.size():
            self.picked = local_kv_heads(heads, kv_heads, group.size(), group.rank())
        self.num_kv_heads = len(self.picked) if self.picked else kv_heads // group.size()

    def _heads(self, x_SBX: Tensor) -> Tensor:
        return x_SBX.unflatten(-1, (-1, self.head_dim))

    def _kv_heads(self, x_SBX: Tensor) -> Tensor:
        if self.picked is None:
            return self._heads(x_SBX)
        everyone = self._heads(mappings.all_gather_last_dim_from_tensor_parallel_region(x_SBX, group=self.group))
        return everyone.index_select(2, torch.tensor(self.picked, device=x_SBX.device))

    def keys_values(self, x_SBX: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [S, B, G, D], of an input that is complete on every rank."""
        k = self._kv_heads(self.k_proj(x_SBX))
        k = k if self.k_norm is None else self.k_norm(k)
        return rotate(k, *rotation), self._kv_heads(self.v_proj(x_SBX))

    def forward(self, x_SBH: Tensor, cos_SB1D: Tensor, sin_SB1D: Tensor, attention: Attention, layer: int) -> Tensor:
        """[S, B, inputs] -> [S, B, H]; both [S / TP, ...] under sequence parallelism."""
        x = enter(x_SBH, self.group, self.sequence_parallel)
        q = self._heads(self.q_proj(x))
        q = q if self.q_norm is None else self.q_norm(q)
        keys_values = self.keys_values(x, (cos_SB1D, sin_SB1D))
        out: Tensor = self.o_proj(attention(layer, rotate(q, cos_SB1D, sin_SB1D), *keys_values))
        return out

    def fused_keys_values(self, x_SBX: Tensor, fused: FusedLayer) -> tuple[Tensor, Tensor]:
        """`keys_values` in fused parts; the positions are those of `fused`."""
        weight = self.k_norm.own_weight()
        projected = fused.products(x_SBX, self.k_proj, self.v_proj)
        _, k, v = fused.heads(projected, 0, self.num_kv_heads, (weight, weight), self.k_norm.eps)
        return k, v

    def fused(
        self, x_SBH: Tensor, fused: FusedLayer, attention: Attention, layer: int, rows_N: Tensor | None = None
    ) -> Tensor:
        """`forward` in fused parts; with `rows_N`, only these rows (s * B + b) of the output: [N, H]."""
        x = enter(x_SBH, self.group, self.sequence_parallel)
        projected = fused.products(x, self.q_proj, self.k_proj, self.v_proj)
        norms = (self.q_norm.own_weight(), self.k_norm.own_weight())
        heads = projected.shape[-1] // self.head_dim - 2 * self.num_kv_heads
        qkv = fused.heads(projected, heads, self.num_kv_heads, norms, self.k_norm.eps)
        out = attention(layer, *qkv)
        out = out if rows_N is None else pick_rows(out.flatten(0, 1), rows_N)
        return self.o_proj.reduced(fused.products(out, self.o_proj))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig, place: Placement) -> None:
        super().__init__()
        H, M, what = config.hidden_size, config.intermediate_size, "draft intermediate_size"
        self.group, self.sequence_parallel = place.group, place.sequence_parallel
        self.gate_proj = ColumnLinear(H, M, what, place, config.mlp_bias)
        self.up_proj = ColumnLinear(H, M, what, place, config.mlp_bias)
        self.down_proj = RowLinear(M, H, what, place, config.mlp_bias)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]; [S / TP, B, H] under sequence parallelism."""
        x = enter(x_SBH, self.group, self.sequence_parallel)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def fused(self, x_SBH: Tensor, fused: FusedLayer) -> Tensor:
        """`forward` in fused parts."""
        x = enter(x_SBH, self.group, self.sequence_parallel)
        return self.down_proj.reduced(fused.gated(fused.products(x, self.gate_proj, self.up_proj), self.down_proj))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer. With `reads_embedding`, attention reads [norm(embedding) ; norm(hidden)] (EAGLE-3).

    The residual stream is the un-normed hidden state, or the normed one with `config.norm_before_residual`. Without
    `input_norm`, attention reads the un-normed state (EAGLE-1).
    """

    def __init__(self, config: LayerConfig, reads_embedding: bool, place: Placement, input_norm: bool = True) -> None:
        super().__init__()
        H = config.hidden_size
        norm = (config.rms_norm_eps, place)
        self.reads_embedding = reads_embedding
        self.norm_before_residual = reads_embedding and config.norm_before_residual
        embedding_size = H if reads_embedding else 0  # the base's, or the draft's own, whose width may differ
        # docs/formats.md#eagle-3: in the first layer `input_layernorm` is the norm of the token embedding.
        self.input_layernorm: Any = RMSNorm(embedding_size or H, *norm) if input_norm else None
        if reads_embedding:
            self.hidden_norm = RMSNorm(H, *norm)
        self.self_attn: Any
        if config.mla is None:
            self.self_attn = SelfAttention(config, embedding_size + H, place)
        else:
            self.self_attn = LatentAttention(config, config.mla, place)
        self.post_attention_layernorm = RMSNorm(H, *norm)
        self.mlp: Any = GatedMLP(config, place) if config.moe is None else MixtureOfExperts(config, config.moe, place)

    def forward(
        self,
        hidden_SBH: Tensor,
        embedding_SBH: Tensor,
        cos_SB1D: Tensor,
        sin_SB1D: Tensor,
        attention: Attention,
        layer: int,
    ) -> Tensor:
        """The next hidden state, same shape as the first argument."""
        if isinstance(attention, FewRows):
            return attention.layer(self, hidden_SBH, embedding_SBH, (cos_SB1D, sin_SB1D), layer)
        if self.reads_embedding:
            normed_SBH = self.hidden_norm(hidden_SBH)
            x = torch.cat([self.input_layernorm(embedding_SBH), normed_SBH], dim=-1)
            hidden_SBH = normed_SBH if self.norm_before_residual else hidden_SBH
        else:
            x = hidden_SBH if self.input_layernorm is None else self.input_layernorm(hidden_SBH)
        hidden_SBH = hidden_SBH + self.self_attn(x, cos_SB1D, sin_SB1D, attention, layer)
        return hidden_SBH + self.mlp(self.post_attention_layernorm(hidden_SBH))

    def fused(
        self,
        hidden_SBH: Tensor,
        delta_SBH: Tensor | None,
        fused: FusedLayer,
        attention: Attention,
        layer: int,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` in fused parts, of hidden + delta. The next norm adds what is returned: (hidden, delta), both
        [S, B, H], or [N, H] of the rows (s * B + b) `rows_N`.

        For layers with `input_norm`, norms of heads and a gated MLP that do not read the embedding.
        """
        hidden_SBH, x = fused.norm(self.input_layernorm, hidden_SBH, delta_SBH)
        delta = self.self_attn.fused(x, fused, attention, layer, rows_N)
        kept = hidden_SBH if rows_N is None else pick_rows(hidden_SBH.flatten(0, 1), rows_N)
        kept, x = fused.norm(self.post_attention_layernorm, kept, delta)
        return kept, self.mlp.fused(x, fused)
