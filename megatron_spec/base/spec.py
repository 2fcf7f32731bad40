"""Structure of the frozen base's layers: megatron-core modules, with our own norm, attention core and experts."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_spec.base.latent_attention import LatentAttention
from megatron_spec.base.modules import CoreAttention, RMSNorm
from megatron_spec.base.moe import MixtureOfExperts
from megatron_spec.config import BaseConfig
from megatron_spec.runtime.distributed import World


def core_options(config: BaseConfig, layer: int) -> dict[str, Any]:
    """Arguments of `CoreAttention` for a layer."""
    size = config.mla.rope_head_dim if config.mla else config.head_dim
    return {
        "window": config.window_of(layer),
        "sinks": config.attention_sinks,
        "rotary_size": config.rope.rotary_dim(size),
        "rotary_factor": config.rope.attention_factor,
        "rotary_last": config.mla is not None,
    }


def _attention(config: BaseConfig, layer: int) -> ModuleSpec:
    options = core_options(config, layer)
    if config.mla:
        return ModuleSpec(module=LatentAttention, params={"mla": config.mla, "core_options": options})
    head_norm: Any = RMSNorm if config.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=CoreAttention, params=options),
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _layer(config: BaseConfig, world: World, layer: int) -> ModuleSpec:
    mlp: Any
    if config.moe is not None and config.has_experts(layer):
        mlp = MixtureOfExperts.of(config.moe, world.base_groups)
    else:
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(config, layer),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # Checkpoints then have the key names of the Transformer Engine specs, whose norms are fused into linears.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(config: BaseConfig, world: World, first: int, count: int) -> TransformerBlockSubmodules:
    """Spec of the stage with layers first .. first + count - 1."""
    layers = [_layer(config, world, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
