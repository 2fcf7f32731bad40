"""Structure of the frozen base's layers: megatron-core modules, with our own norm and core attention.

S sequence, B micro-batch, N query heads and G key/value heads of this rank, D head size, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_spec.ops.attention import AttentionPlan, attend


class RMSNorm(nn.Module):
    """Root mean square norm. megatron-core's torch version refuses sequence parallelism; this one marks its weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], computed in fp32 inside."""
        return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)


class PlannedAttention(nn.Module):
    """Core attention under the current `AttentionPlan`, which `FrozenBase` sets before each forward."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.plan: AttentionPlan | None = None
        self.cache_layer = 0
        """Index of this layer in the stage's KVCache."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D], rotated -> [S, B, N*D]. The mask argument is not used."""
        assert self.plan is not None, "FrozenBase must set the attention plan before a forward"
        return attend(query, key, value, self.plan, self.cache_layer)


def _layer_spec() -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PlannedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints then have the key names of the Transformer Engine specs, whose norms are fused into linears.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Spec of a stage of `num_layers` Llama layers."""
    return TransformerBlockSubmodules(layer_specs=[_layer_spec()] * num_layers, layer_norm=RMSNorm)
