"""Multi-head latent attention of DeepSeek-V3 (arXiv 2412.19437, section 2.1.1), under megatron-core's names.

Queries and keys have a non-rotary and a rotary part; all heads share the rotary part of the keys.
Keys and values are expanded before attention, so the cache holds full keys and values.

S sequence, B micro-batch, H hidden, N heads of this rank, D = nope + rope sizes of a query or key head, V of a value.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_spec.base.modules import LOCAL_MODULES, CoreAttention, LayerModules
from megatron_spec.config import MlaConfig
from megatron_spec.ops import latent as latent_ops


class LatentAttention(nn.Module):
    """Replaces megatron-core's SelfAttention."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: Any, mla: MlaConfig,
        core_options: dict[str, Any], modules: LayerModules = LOCAL_MODULES, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mla, self.tp, self.sequence_parallel = mla, pg_collection.tp, config.sequence_parallel
        heads, size = config.num_attention_heads, mla.nope_head_dim + mla.rope_head_dim
        self.heads, H, eps = heads // self.tp.size(), config.hidden_size, latent_ops.LATENT_EPS
        options = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp, is_expert=False)
        column = dict(options, gather_output=False, skip_bias_add=False)
        self.linear_q_proj = self.linear_q_down_proj = self.linear_q_up_proj = self.q_layernorm = None
        if mla.q_lora_rank is None:
            self.linear_q_proj = modules.column(H, heads * size, **column)
        else:
            self.linear_q_down_proj = modules.replicated(config, H, mla.q_lora_rank)
            self.q_layernorm = modules.norm(config=config, hidden_size=mla.q_lora_rank, eps=eps)
            self.linear_q_up_proj = modules.column(mla.q_lora_rank, heads * size, **column)
        self.linear_kv_down_proj = modules.replicated(config, H, mla.kv_lora_rank + mla.rope_head_dim)
        self.kv_layernorm = modules.norm(config=config, hidden_size=mla.kv_lora_rank, eps=eps)
        width = heads * (mla.nope_head_dim + mla.v_head_dim)
        self.linear_kv_up_proj = modules.column(mla.kv_lora_rank, width, **column)
        self.core_attention = CoreAttention(
            config, layer_number, tp_group=self.tp, scale=mla.score_factor * size**-0.5, **core_options
        )
        self.linear_proj = modules.row(heads * mla.v_head_dim, H, input_is_parallel=True, skip_bias_add=True, **options)

    def forward(
        self, hidden_SBH: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, H], no bias); rows are sharded under sequence parallelism."""
        assert rotary_pos_emb is not None
        mla = self.mla
        latent, k_rotary = self.linear_kv_down_proj(hidden_SBH)[0].split([mla.kv_lora_rank, mla.rope_head_dim], -1)
        if self.sequence_parallel:  # the latent is gathered by the projection itself
            k_rotary = gather_from_sequence_parallel_region(k_rotary.contiguous(), group=self.tp)
        q, kv = self._queries(hidden_SBH), self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        q, kv = (x.unflatten(-1, (self.heads, -1)) for x in (q, kv))
        cos, sin = rotary_pos_emb.cos().to(q.dtype), rotary_pos_emb.sin().to(q.dtype)
        query, key, value = latent_ops.expand(q, k_rotary, kv, mla, cos, sin)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(self.core_attention(query, key, value.contiguous()))
        return out

    def _queries(self, hidden_SBH: Tensor) -> Tensor:
        if self.linear_q_proj is not None:
            return self.linear_q_proj(hidden_SBH)[0]  # type: ignore[no-any-return]
        assert self.linear_q_down_proj is not None and self.linear_q_up_proj is not None
        assert self.q_layernorm is not None
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_SBH)[0])
        return self.linear_q_up_proj(latent)[0]  # type: ignore[no-any-return]
