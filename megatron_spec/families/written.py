"""Writes a config.json for a base without one (a Megatron checkpoint of a dense family)."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig
from megatron_spec.config.rope import rope_scaling_json
from megatron_spec.families.families import BY_NAME


def config_json(config: BaseConfig) -> dict[str, Any]:
    """Contents of a config.json that `parse_base_config` reads as `config`."""
    rope = config.rope
    ends = config.eos_token_ids
    found: dict[str, Any] = {
        "architectures": [BY_NAME[config.family].architecture],
        "model_type": config.family,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope_scaling_json(rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.torch_dtype,
    }
    if config.window is not None:
        found |= {"sliding_window": config.window, "use_sliding_window": True}
    return found
