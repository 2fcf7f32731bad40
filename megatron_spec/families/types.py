"""Types and ranges of the values in a config.json; an error names file, key and expected type."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import Types, check_object

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "num_local_experts", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "original_max_position_embeddings", "n_group", "topk_group", "moe_layer_freq",
    "decoder_sparse_step",
)  # fmt: skip
"""Positive integers."""
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "swiglu_limit", "swiglu_alpha",
            "routed_scaling_factor")  # fmt: skip
_COUNTS = ("sliding_window", "max_window_layers", "n_shared_experts", "first_k_dense_replace",
           "num_nextn_predict_layers")  # fmt: skip
_SWITCHES = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "norm_topk_prob",
             "rope_interleave")  # fmt: skip
CONFIG: Types = {
    **dict.fromkeys((*_SIZES, *_COUNTS), int), **dict.fromkeys(_NUMBERS, float), **dict.fromkeys(_SWITCHES, bool),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), (int, list)),
    **dict.fromkeys(("hidden_act", "torch_dtype", "dtype", "scoring_func", "topk_method"), str),
    **dict.fromkeys(("architectures", "layer_types", "mlp_only_layers"), list),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config", "compression_config"), dict),
}  # fmt: skip
"""Types of the keys that are read."""
ROPE: Types = {
    **dict.fromkeys(
        ("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
         "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), float),
    "original_max_position_embeddings": int, "rope_type": str, "type": str, "truncate": bool,
    "short_factor": list, "long_factor": list,
}  # fmt: skip
"""Types of the keys in `rope_scaling` and `rope_parameters`."""
_ITEMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "mlp_only_layers"), int),
    **dict.fromkeys(("architectures", "layer_types"), str), **dict.fromkeys(("short_factor", "long_factor"), float),
}  # fmt: skip
"""Types of the items of lists."""


def _check_items(raw: dict[str, Any], where: str) -> None:
    for key, kind in _ITEMS.items():
        items = raw.get(key)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            check_object({f"{key}[{number}]": "null" if item is None else item}, where, {f"{key}[{number}]": kind})


def check_config(raw: Any, where: str) -> dict[str, Any]:
    """The contents of a config.json without nulls, after checks of types and ranges. Unread keys are not checked.

    Raises UserError naming `where`, the key and the expected type or range.
    """
    config = _checked(raw, where, CONFIG)
    for key in ("rope_scaling", "rope_parameters"):
        if key in config:
            config[key] = _checked(config[key], f"{where}: {key}", ROPE)
    return config


def _checked(raw: Any, where: str, types: Types) -> dict[str, Any]:
    config = {key: value for key, value in check_object(raw, where, types).items() if value is not None}
    _check_items(config, where)
    for key in {*_SIZES, *_COUNTS} & config.keys():
        low, high = int(key in _SIZES), 10_000 if "layers" in key else 2**31 - 1
        if not low <= config[key] <= high:
            raise UserError(f"{where}: {key} is {config[key]}, expected an integer from {low} to {high}")
    return config
