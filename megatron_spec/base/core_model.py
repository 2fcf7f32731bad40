"""megatron-core's model classes as the frozen base reads them: GPTModel, and HybridModel of attention and MLP layers.

The differences of the classes end here: both give transformer layers with the same four modules, and names of a
GPTModel. Before megatron-core 0.18 HybridModel was called MambaModel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from megatron_spec.base.modules import CoreAttention
from megatron_spec.config import BaseConfig, UserError
from megatron_spec.families.hybrid import PAIR, gpt_name, transformer_layers
from megatron_spec.families.megatron_args import HIDDEN
from megatron_spec.ops.rope import inverse_frequencies

_HYBRID = ("megatron.core.models.hybrid.hybrid_model.HybridModel", "megatron.core.models.mamba.mamba_model.MambaModel")
"""Compared by name, because importing them imports every module of a Mamba layer."""

_PARTS = {"*": ("input_layernorm", "self_attention"), "-": ("pre_mlp_layernorm", "mlp")}
"""Symbol of a layer -> its modules with parameters."""


class Pair(nn.Module):
    """An attention and an MLP layer of a HybridModel, with the names that they have in a TransformerLayer."""

    def __init__(self, attention: Any, mlp: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = attention.input_layernorm, attention.self_attention
        self.pre_mlp_layernorm, self.mlp = mlp.pre_mlp_layernorm, mlp.mlp


@dataclass(frozen=True)
class CoreModel:
    """One pipeline stage of a megatron-core model.

    Attributes:
        model: GPTModel or HybridModel.
        layers: its transformer layers.
        outputs: for each of them, the module that returns its output.
        final_norm: on the last stage.
    """

    model: Any
    layers: list[Any]
    outputs: list[Any]
    final_norm: Any

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of a GPTModel; layers are counted inside the stage."""
        rename = str if isinstance(self.model, GPTModel) else gpt_name
        return {rename(name): parameter for name, parameter in self.model.named_parameters()}


def core_model(model: Any) -> CoreModel:
    """The stage in a GPTModel, or in a HybridModel that `stage_counts` accepts."""
    layers = list(model.decoder.layers)
    if isinstance(model, GPTModel):
        return CoreModel(model, layers, layers, getattr(model.decoder, "final_layernorm", None))
    pairs: list[Any] = [Pair(a, m) for a, m in zip(layers[::2], layers[1::2], strict=True)]
    return CoreModel(model, pairs, layers[1::2], getattr(model.decoder, "final_norm", None))


def unwrapped(model: Any) -> Any:
    """The GPTModel or HybridModel inside wrappers, or inside a list of one. Raises UserError for anything else."""
    chunks = model if isinstance(model, list) else [model]
    if len(chunks) != 1:
        raise UserError(
            f"found {len(chunks)} model chunks (interleaved pipeline), expected one: build the base without "
            "virtual pipeline stages"
        )
    found = chunks[0]
    while not _is_known(found) and hasattr(found, "module"):
        found = found.module
    if not _is_known(found):
        raise UserError(
            f"found {type(found).__name__}, expected megatron-core's GPTModel or HybridModel (before megatron-core "
            "0.18: MambaModel), or a list of one"
        )
    return found


def _is_known(model: Any) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    return isinstance(model, GPTModel) or not names.isdisjoint(_HYBRID)


def _pattern(model: Any) -> str:
    """Layers of this stage as `families.hybrid` writes them; a GPTModel's are pairs."""
    if isinstance(model, GPTModel):
        return PAIR * len(model.decoder.layers)
    return "".join(model.decoder.layer_type_list)


def _problem(model: Any) -> str | None:
    """What makes this stage of a HybridModel another function than that of its pairs; None if nothing does."""
    if isinstance(model, GPTModel):
        return None
    name = type(model).__name__
    if model.position_embedding_type != "rope":
        return f"found a {name} with position_embedding_type={model.position_embedding_type!r}, expected 'rope'"
    if model.post_process and not hasattr(model.decoder, "final_norm"):
        return f"found a {name} without a final norm (post_layer_norm=False), expected one"
    for number, (symbol, layer) in enumerate(zip(_pattern(model), model.decoder.layers, strict=True)):
        parts = _PARTS.get(symbol, ())
        extra = [
            part
            for part, module in layer.named_children()
            if part not in parts and next(module.parameters(), None) is not None
        ]
        if parts and extra:
            return f"found {', '.join(extra)} in layer {number} of a {name}, expected {' and '.join(parts)}"
    return None


def _other_base(model: Any, config: BaseConfig) -> str | None:
    """Where this stage computes something else than a base of this configuration, as far as it shows; else None.

    Its layers run as they are, but their rotary angles and everything that is saved and exported follow `config`.
    """
    core, latent = model.config, config.mla is not None
    own = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": None if latent else config.num_key_value_heads,
        "kv_channels": None if latent else config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": None if latent else config.qk_norm,
        "gated_linear_unit": True,
    }
    if not (config.attention_bias or config.mlp_bias or (config.moe and config.moe.bias)):
        own |= {"add_bias_linear": False, "add_qkv_bias": config.qkv_bias}
    expected = {name: (value,) for name, value in own.items() if value is not None}
    if not latent:
        special = {"window_size"} if config.window else set()
        special |= (
            {"softmax_type", "activation_func_clamp_value", "glu_linear_offset"} if config.attention_sinks else set()
        )
        expected |= {name: fit for name, fit in HIDDEN.items() if name not in special}
    found = {name: getattr(core, name, fit[0]) for name, fit in expected.items()}  # an older one has fewer options
    tied = "share_embeddings_and_output_weights"
    found[tied], expected[tied] = getattr(model, tied), (config.tie_word_embeddings,)
    wrong = [f"{name} is {found[name]}, expected {fit[0]}" for name, fit in expected.items() if found[name] not in fit]
    if model.vocab_size < config.vocab_size:
        wrong.append(f"vocab_size is {model.vocab_size}, expected at least {config.vocab_size}")
    if not (latent or wrong):
        wrong += _other_angles(model, config)
    return f"the {type(model).__name__} is not the base in its base_path: {'; '.join(wrong)}" if wrong else None


def _other_angles(model: Any, config: BaseConfig) -> list[str]:
    if any(isinstance(module, CoreAttention) for module in model.modules()):
        return []  # built by FrozenBase: it has no angles of its own
    if model.position_embedding_type not in ("rope", "yarn"):
        return [f"position_embedding_type is {model.position_embedding_type!r}, expected 'rope'"]
    given = model.rotary_pos_emb(2)  # yarn: and the factor of queries and keys, which attention applies
    angles = given[0] if isinstance(given, tuple) else given
    expected = inverse_frequencies(config.rope, config.head_dim, angles.device)
    found = angles[1].flatten().float()  # position 1: the frequencies, twice
    if len(found) == 2 * len(expected) and torch.allclose(found, expected.repeat(2), rtol=1e-4, atol=0):
        return []
    return [
        f"its rotary frequencies are not those of {config.rope} (compare --rotary-base, --rotary-percent, "
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor)"
    ]


def check_rows(model: Any, config: BaseConfig, tokens: int) -> None:
    """Raise UserError for rows of a user's model that only a sliding window, which it lacks, would cut."""
    if config.window is not None and config.window < tokens and getattr(model.config, "window_size", None) is None:
        raise UserError(
            f"the base has a sliding window of {config.window}, the wrapped model none (window_size), and rows have "
            f"{tokens} tokens: build the model with it, use shorter rows, or load the base with load_base"
        )


def stage_counts(model: Any, config: BaseConfig, pp: dist.ProcessGroup) -> list[int]:
    """Transformer layers of every pipeline stage. Collective over `pp`, whose ranks refuse a model together.

    Raises:
        UserError: a HybridModel with layers that are neither attention nor MLP, or do not pair up; or a model that
            differs from `config`: depth, widths, norms, rotary angles, tied ends.
    """
    found: list[Any] = [None] * pp.size()
    dist.all_gather_object(found, (_pattern(model), _problem(model) or _other_base(model, config)), group=pp)
    name = type(model).__name__
    counts = transformer_layers("|".join(pattern for pattern, _ in found), name)
    if sum(counts) != config.num_layers:
        raise UserError(
            f"found {sum(counts)} transformer layers in the {name}, expected {config.num_layers} as in its base_path: "
            "give the folder of this model"
        )
    for _, problem in found:
        if problem is not None:
            raise UserError(f"{problem}: convert() cannot wrap it")
    return counts
