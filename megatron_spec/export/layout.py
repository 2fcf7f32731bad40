"""What an exported EAGLE-3 folder contains, derived from its configuration alone: names, shapes, config.json.

No torch here: the exporter writes by this layout, the verifier and `tools/check_export.py` read by it.

H draft hidden, Ht target hidden, K captured layers, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_spec.config import BaseConfig, EagleConfig, RopeConfig, UserError
from megatron_spec.presets import default_capture_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = "model.safetensors"
LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Linears that engines fuse: one scale each."""


def layer_names(config: EagleConfig) -> list[str]:
    """Prefix of every decoder layer: 'midlayer' loads everywhere; more layers need the numbered form."""
    if config.num_hidden_layers == 1:
        return ["midlayer"]
    return [f"layers.{i}" for i in range(config.num_hidden_layers)]


def linear_names(config: EagleConfig) -> list[str]:
    """Every linear that may be fp8."""
    return [f"{layer}.{linear}" for layer in layer_names(config) for linear in LINEARS]


def _layer_shapes(config: EagleConfig, first: bool) -> dict[str, tuple[int, ...]]:
    H, F = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    width = 2 * H if first else H
    return {
        "input_layernorm.weight": (H,),
        "hidden_norm.weight": (H,),  # in later layers a copy of input_layernorm: engines differ in the name they read
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (H, queries),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (F, H),
        "mlp.up_proj.weight": (F, H),
        "mlp.down_proj.weight": (H, F),
    }


def weight_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Every floating point tensor that is a parameter of the draft, with its shape in the file."""
    captures = len(config.capture_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (config.hidden_size, captures * config.target_hidden_size)}
    for i, layer in enumerate(layer_names(config)):
        shapes |= {f"{layer}.{name}": shape for name, shape in _layer_shapes(config, i == 0).items()}
    shapes["norm.weight"] = (config.hidden_size,)
    shapes["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    return shapes


def expected_tensors(
    config: EagleConfig, dtype: str, fp8: set[str] | None = None, embeddings: bool = False
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of every tensor of the file; dtypes in torch's spelling.

    Args:
        dtype: of everything that is not quantised.
        fp8: names of the linears that are.
        embeddings: the file carries the target's embedding.
    """
    fp8 = fp8 or set()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in weight_shapes(config).items():
        linear = name.removesuffix(".weight")
        tensors[name] = ("float8_e4m3fn" if linear in fp8 else dtype, shape)
        if linear in fp8:
            tensors[f"{linear}.weight_scale"] = ("float32", ())
            tensors[f"{linear}.input_scale"] = ("float32", ())
    if config.draft_vocab_size < config.vocab_size:  # vLLM raises when they are there without need
        tensors["d2t"] = ("int64", (config.draft_vocab_size,))
        tensors["t2d"] = ("bool", (config.vocab_size,))
    if embeddings:
        tensors["embed_tokens.weight"] = (dtype, (config.vocab_size, config.target_hidden_size))
    return tensors


def is_default_captures(config: EagleConfig, num_base_layers: int) -> bool:
    """True when engines choose the same layers without being told."""
    try:
        return tuple(config.capture_layer_ids) == default_capture_ids(num_base_layers)
    except UserError:  # a small base has no defaults
        return False


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Top-level rope_theta and rope_scaling: a file with only `rope_parameters` is read as theta 10000 by many."""
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.type == "linear":
        keys["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    if rope.type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        keys["rope_scaling"] = {"rope_type": "llama3", **{name: getattr(rope, name) for name in names}}
    return keys


def _capture_keys(config: EagleConfig, num_base_layers: int) -> dict[str, Any]:
    """Both conventions: top-level 'state after k layers', nested 'output of layer j', k = j + 1."""
    if is_default_captures(config, num_base_layers):
        return {}
    ids = list(config.capture_layer_ids)
    return {
        "eagle_aux_hidden_state_layer_ids": [j + 1 for j in ids],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }


def config_json(config: EagleConfig, base: BaseConfig, dtype: str) -> dict[str, Any]:
    """Content of config.json, without a `quantization_config`. Holds no null."""
    eos = list(base.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        **_rope_keys(config.rope),
        # Engines size their rotary table and their longest context by it: a draft may not be shorter than its target.
        "max_position_embeddings": max(config.max_position_embeddings, base.max_position_embeddings),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": base.pad_token_id,
        **_capture_keys(config, base.num_layers),
    }
    return {key: value for key, value in values.items() if value is not None}


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return RopeConfig.from_dict({"theta": float(raw["rope_theta"]), "type": kind, **scaling})


def read_config_json(raw: dict[str, Any], num_base_layers: int) -> EagleConfig:
    """The EagleConfig an engine would build from an exported config.json. Raises UserError on a missing key.

    Fields that only matter before training (initialisation) keep their defaults.
    """
    if raw.get("architectures") != [ARCHITECTURE]:
        raise UserError(f"config.json: architectures {raw.get('architectures')!r}, expected [{ARCHITECTURE!r}]")
    same = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "draft_vocab_size", "max_position_embeddings", "num_hidden_layers", "rms_norm_eps", "hidden_act",
    )  # fmt: skip
    missing = [key for key in (*same, "rope_theta") if key not in raw]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}")
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = raw.get("eagle_aux_hidden_state_layer_ids")
    if top is not None and nested is not None and [j + 1 for j in nested] != list(top):
        raise UserError(f"config.json: capture ids disagree: top level {top} (state after k layers), nested {nested}")
    if nested is None and top is not None:
        nested = [k - 1 for k in top]
    values = {key: raw[key] for key in same}
    values["algorithm"] = "eagle3"
    values["target_hidden_size"] = raw.get("target_hidden_size", raw["hidden_size"])
    values["capture_layer_ids"] = list(nested) if nested is not None else list(default_capture_ids(num_base_layers))
    values["rope"] = _read_rope(raw)
    return EagleConfig.from_dict(values)


def has_layer_number(pattern: str) -> bool:
    """True for patterns such as '*layers.3*': engines name the draft's layers differently, so they match nowhere."""
    return re.search(r"\d", pattern) is not None
