"""Content of an exported EAGLE or MTP folder, derived only from its configuration: names, shapes, config.json.

See docs/formats.md. No torch here: the exporter writes this layout; verifier and `tools/check_export.py` read it.

Engines share no format for MTP drafts other than a base's own (`native_mtp.py`): tensors are named as in a layer of
DeepSeek-V3, with layers counted from 0, and the architecture has a name of its own, so no engine mistakes it for
another model.

H draft hidden, Ht target hidden, K captured layers, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, EagleConfig, RopeConfig, UserError
from megatron_spec.config.presets import default_capture_ids
from megatron_spec.config.rope import rope_scaling_json
from megatron_spec.config.structure import draft_tensors, layer_names, quantisable
from megatron_spec.export import block, native_mtp
from megatron_spec.export.formats.eagle import OPTIONS
from megatron_spec.export.quant_metadata import DRAFT_EXCLUDES

ARCHITECTURES: dict[str, list[str]] = {
    "eagle1": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
    "eagle3": ["LlamaForCausalLMEagle3"],
    "eagle3.1": ["LlamaForCausalLMEagle3"],
    "p-eagle": ["LlamaForCausalLMEagle3"],
    "eagle-mtp": ["LlamaForCausalLMMTP"],
}
QK_NORM_ARCHITECTURES = ["Eagle3Qwen3ForCausalLM"]
"""vLLM's architecture for an EAGLE-3 draft with norms over query and key heads; other engines have none."""
Exported = EagleConfig | BlockConfig
"""Configurations of drafts whose folder is described here."""
WEIGHTS = "model.safetensors"
SERVED_BY: dict[str, tuple[str, ...]] = {
    "qk_norm": ("vllm",), "attention_bias": ("vllm", "trtllm"), "mlp_bias": ("vllm", "trtllm"),
    "fc_bias": ("sglang", "trtllm"), "norm_before_residual": ("vllm",), "sliding_window": ("vllm",),
    "own_embed_tokens": ("vllm",), "parallel_drafting": ("vllm",), "fc_of_equal_widths": ("vllm",),
    "fc_of_one_capture": ("vllm", "sglang"), "partial_rotation": ("vllm", "trtllm"),
    "norm_before_fc_and_fc_norm": ("vllm", "sglang"),
}  # fmt: skip
"""Option or property of `EagleConfig` -> engines that compute it; every engine computes what is not listed."""
SERVED_EAGLE1: dict[str, tuple[str, ...]] = {"qk_norm": (), "attention_bias": ("vllm", "sglang", "trtllm")}
"""The same of EAGLE-1 where it differs: its layer in SGLang is that of a Llama with the biases."""
SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Groups of linears that engines fuse; each group shares one scale."""


def high_precision(config: Exported, fp8: set[str]) -> list[str]:
    """Modules of a quantised draft that stay in high precision, as patterns that engines match.

    Args:
        fp8: the quantised linears; other kinds of linears are added to the patterns.
    """
    kept = sorted({"*" + name.rpartition(".")[2] for name in quantisable(config) if name not in fp8})
    if not isinstance(config, BlockConfig):
        return DRAFT_EXCLUDES + kept
    heads = [f"*{x}_head*" for x in ("markov", "confidence") if getattr(config, f"has_{x}_head")]
    return DRAFT_EXCLUDES + [f"*{x}_proj" for x in ("q", "k", "v", "qkv")] + heads + kept


def weight_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Every floating-point parameter of the draft, with its shape in the file.

    Later EAGLE-3 layers store their input norm under both names in use, because engines read different ones.
    """
    shapes = {native_mtp.file_name(config, name): spec.shape for name, spec in draft_tensors(config).items()}
    for layer in layer_names(config)[1:] if config.reads_captures else ():
        shapes[f"{layer}.hidden_norm.weight"] = shapes[f"{layer}.input_layernorm.weight"]
    return shapes


def zero_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Tensors of zeros needed only by loaders: SGLang leaves a missing EAGLE-1 bias uninitialised."""
    return {"fc.bias": (config.hidden_size,)} if config.regresses_state and not config.fc_bias else {}


def expected_tensors(
    config: Exported, dtype: str, fp8: set[str] | None = None, embeddings: bool = False, form: str = "fp8"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of every tensor of the file; dtypes as named by torch.

    Args:
        dtype: data type of everything that is not quantised.
        fp8: names of the quantised linears.
        form: 'fp8', or 'nvfp4': two weights per byte, and a scale per block of 16.
        embeddings: the file includes the target's embedding.
    """
    fp8 = fp8 or set()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in weight_shapes(config).items():
        linear = name.removesuffix(".weight")
        if linear in fp8 and form == "nvfp4":
            tensors[name] = ("uint8", (shape[0], shape[1] // 2))
            tensors[f"{linear}.weight_scale"] = ("float8_e4m3fn", (shape[0], shape[1] // 16))
            tensors[f"{linear}.weight_scale_2"] = ("float32", ())
            continue
        tensors[name] = ("float8_e4m3fn" if linear in fp8 else native_mtp.dtype_of(name, dtype), shape)
        if linear in fp8:
            tensors[f"{linear}.weight_scale"] = ("float32", ())
            tensors[f"{linear}.input_scale"] = ("float32", ())
    tensors |= {name: (dtype, shape) for name, shape in zero_shapes(config).items()}
    if config.draft_vocab_size < config.vocab_size:  # vLLM raises when they are present without need
        tensors["d2t"] = ("int64", (config.draft_vocab_size,))
        tensors["t2d"] = ("bool", (config.vocab_size,))
    if embeddings:
        tensors |= {name: (dtype, shape) for name, shape in end_shapes(config).items()}
    return tensors


def end_shapes(config: Exported) -> dict[str, tuple[int, ...]]:
    """Optional tensors of the base: its embedding, and with its own prediction module also its LM head."""
    if config.of_base:
        return native_mtp.end_shapes(config)
    return {} if config.own_embedding else {"embed_tokens.weight": (config.vocab_size, config.target_hidden_size)}


def is_default_captures(config: EagleConfig, num_base_layers: int) -> bool:
    """True when the captured layers are the engines' defaults."""
    try:
        return tuple(config.capture_layer_ids) == default_capture_ids(num_base_layers)
    except UserError:  # a small base has no defaults
        return False


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Top-level rope_theta and rope_scaling: many loaders read a file with only `rope_parameters` as theta 10000."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": rope_scaling_json(rope)}
    if rope.partial_rotary_factor != 1.0:
        keys["partial_rotary_factor"] = rope.partial_rotary_factor
    return keys


def _capture_keys(config: EagleConfig, num_base_layers: int) -> dict[str, Any]:
    """Capture ids in both conventions: top-level 'state after k layers', nested 'output of layer j', k = j + 1.

    Options of EAGLE-3.1 are also written in both places; whenever eagle_config exists, it includes the ids.
    """
    options = {name: True for name in OPTIONS if getattr(config, name)}
    if not config.reads_captures or (not options and is_default_captures(config, num_base_layers)):
        return options
    ids = list(config.capture_layer_ids)
    return {
        "eagle_aux_hidden_state_layer_ids": [j + 1 for j in ids],
        **options,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **options},
    }


def _window_keys(config: EagleConfig) -> dict[str, Any]:
    """Keys of the window; vLLM applies it to the layers that `layer_types` marks."""
    if config.sliding_window is None:
        return {}
    types = ["sliding_attention"] * config.num_hidden_layers
    return {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": types}


def config_json(config: Exported, base: BaseConfig, dtype: str) -> dict[str, Any]:
    """Content of config.json without `quantization_config`. Contains no null."""
    if isinstance(config, BlockConfig):
        return block.config_json(config, base, dtype, _rope_keys(config.rope))
    eos, qk_norm_eagle3 = list(base.eos_token_ids), config.qk_norm and config.reads_captures
    values: dict[str, Any] = {
        "architectures": QK_NORM_ARCHITECTURES if qk_norm_eagle3 else ARCHITECTURES[config.algorithm],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        **({"target_hidden_size": config.target_hidden_size} if config.own_embedding else {}),
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **_rope_keys(config.rope),
        # Engines size rotary table and maximum context by it: it must not be smaller than the target's.
        "max_position_embeddings": max(config.max_position_embeddings, base.max_position_embeddings),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        **({"bias": True} if config.fc_bias else {}),
        **({"norm_before_residual": True} if config.norm_before_residual else {}),
        **_window_keys(config),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": base.pad_token_id,
        **({"num_nextn_predict_layers": 1} if config.is_module else {}),
        "ptd_token_id": config.mask_token_id,  # vLLM's key for the token of rows yet to be drafted (P-EAGLE)
        **_capture_keys(config, base.num_layers),
    }
    return {key: value for key, value in values.items() if value is not None}


def has_layer_number(pattern: str) -> bool:
    """True for patterns like '*layers.3*', which match nothing in engines: they number draft layers differently."""
    return re.search(r"\d", pattern) is not None
