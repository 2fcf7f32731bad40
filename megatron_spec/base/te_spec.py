"""The frozen base's layers from Transformer Engine's modules: norms fused into the linears after them.

Attention stays `CoreAttention` (flash or cuDNN attention through torch), so packed documents, context parallelism
and the KV cache work as with the local spec. The weights, the checkpoints and, within rounding, the numbers are the
same; only the norms are parameters of the linears.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from megatron_spec.base.modules import CoreAttention, RMSNorm
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.config.machine import Machine

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of the norms inside the linears -> their own names."""


def check(config: BaseConfig, machine: Machine) -> None:
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


def block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Spec of a stage of `num_layers` Llama layers."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=TELayerNormColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=TERowParallelLinear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def named_parameters(gpt: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a stage under the names of the local spec, whichever spec it was built from."""
    for name, parameter in gpt.named_parameters():
        for fused, own in FUSED_NORMS.items():
            name = name.replace(fused, own)
        yield name, parameter
