"""Structure of the frozen base's layers: megatron-core modules, with this package's norm, core attention and experts.

The linears are megatron-core's own or Transformer Engine's, which fuse each norm into the linear after it. Attention is
`CoreAttention` with both. Weights, checkpoints and, within rounding, outputs are the same; only the names of the norms
differ.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field
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
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.config.machine import Machine
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


def check_transformer_engine(config: BaseConfig, machine: Machine) -> None:
    """Raise UserError when the base cannot be built from Transformer Engine's modules here."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed (pip install "
            "'megatron-spec[te]'); use --transformer-impl local"
        )
    if not machine.gpu:
        raise UserError("--transformer-impl transformer_engine needs a GPU; use --transformer-impl local")
    if config.family != "llama":
        raise UserError(f"--transformer-impl transformer_engine: {config.family} is built from local layers only")


@dataclass(frozen=True)
class _Linears:
    """Modules that a layer is built from."""

    column: Any = ColumnParallelLinear
    """Column-parallel linear after a norm, which may be fused into it."""
    row: Any = RowParallelLinear
    norm: Any = RMSNorm
    """Norm before a `column`; the identity where it is fused."""
    keys: dict[str, str] = field(default_factory=lambda: dict(FUSED_NORMS))
    """Names of the norms in a checkpoint, where they differ from the names of the modules."""


def _transformer_engine() -> _Linears:
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    return _Linears(TELayerNormColumnParallelLinear, TERowParallelLinear, IdentityOp, {})


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


def _attention(config: BaseConfig, layer: int, linears: _Linears) -> ModuleSpec:
    options = core_options(config, layer)
    if config.mla:
        return ModuleSpec(module=LatentAttention, params={"mla": config.mla, "core_options": options})
    head_norm: Any = RMSNorm if config.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears.column,
            core_attention=ModuleSpec(module=CoreAttention, params=options),
            linear_proj=linears.row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _dense(width: int, linears: _Linears) -> Any:
    submodules = MLPSubmodules(linear_fc1=linears.column, linear_fc2=linears.row)
    if not hasattr(MLP, "as_mlp_submodule"):  # before megatron-core 0.18
        return ModuleSpec(module=MLP, params={"ffn_hidden_size": width}, submodules=submodules)
    return functools.partial(MLP.as_mlp_submodule, submodules=submodules, ffn_hidden_size=width)


def _layer(config: BaseConfig, world: World, layer: int, linears: _Linears) -> ModuleSpec:
    mlp: Any
    if config.moe is not None and config.has_experts(layer):
        mlp = MixtureOfExperts.of(config.moe, world.base_groups)
    else:
        mlp = _dense(config.intermediate_size, linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=linears.norm,
            self_attention=_attention(config, layer, linears),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=linears.norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=linears.keys,
        ),
    )


def block_spec(
    config: BaseConfig, world: World, first: int, count: int, transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Spec of the stage with layers first .. first + count - 1."""
    linears = _transformer_engine() if transformer_engine else _Linears()
    layers = [_layer(config, world, layer, linears) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
