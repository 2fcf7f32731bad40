"""Structure of the frozen base's layers: megatron-core modules, with this package's norm, core attention and experts.

Linears and norms are megatron-core's own or Transformer Engine's, where a linear may include the norm before it.
Weights, checkpoints and, within rounding, outputs are the same; only the names of the norms differ.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_spec.base import te
from megatron_spec.base.latent_attention import LatentAttention
from megatron_spec.base.modules import LOCAL_MODULES, CoreAttention, LayerModules
from megatron_spec.base.moe import MixtureOfExperts
from megatron_spec.config import BaseConfig
from megatron_spec.runtime.distributed import World

FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of a layer's norms -> their names inside Transformer Engine's linears, and in every checkpoint."""


def own_name(name: str) -> str:
    """A parameter's name in layers of megatron-core's own modules, from its name in either kind of layer."""
    for own, fused in FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


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


def _attention(config: BaseConfig, layer: int, modules: LayerModules) -> ModuleSpec:
    options = core_options(config, layer)
    if config.mla:
        return ModuleSpec(
            module=LatentAttention, params={"mla": config.mla, "core_options": options, "modules": modules}
        )
    head_norm: Any = modules.norm if config.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.normed_column,
            core_attention=ModuleSpec(module=CoreAttention, params=options),
            linear_proj=modules.row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _dense(width: int, modules: LayerModules) -> Any:
    submodules = MLPSubmodules(linear_fc1=modules.normed_column, linear_fc2=modules.row)
    if not hasattr(MLP, "as_mlp_submodule"):  # before megatron-core 0.18
        return ModuleSpec(module=MLP, params={"ffn_hidden_size": width}, submodules=submodules)
    return functools.partial(MLP.as_mlp_submodule, submodules=submodules, ffn_hidden_size=width)


def _layer(config: BaseConfig, world: World, layer: int, modules: LayerModules) -> ModuleSpec:
    mlp: Any
    sparse = config.moe is not None and config.has_experts(layer)
    if sparse:
        assert config.moe is not None
        mlp = MixtureOfExperts.of(config.moe, world.base_groups, modules)
    else:
        mlp = _dense(config.intermediate_size, modules)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm if config.mla else modules.norm_before,
            self_attention=_attention(config, layer, modules),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm if sparse else modules.norm_before,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(FUSED_NORMS),
        ),
    )


def block_spec(
    config: BaseConfig, world: World, first: int, count: int, transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Spec of the stage with layers first .. first + count - 1."""
    modules = te.layer_modules() if transformer_engine else LOCAL_MODULES
    layers = [_layer(config, world, layer, modules) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.norm)
