"""Llama: config.json -> BaseConfig, and the names of its parameters in both worlds.

Llama's rotary embedding pairs dimension i with i + head_dim/2 in Hugging Face and in megatron-core alike, so no
row of q or k needs to move; only the grouping of q, k and v into one matrix differs (`names.py`).
"""

from __future__ import annotations

from typing import Any

from megatron_spec.base_models.names import NameRule
from megatron_spec.config import BaseConfig, RopeConfig, UserError

_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What rope_scaling holds, by supported type."""


def _rope(raw: dict[str, Any], where: str) -> RopeConfig:
    """Old files: rope_theta + rope_scaling; transformers 5: rope_parameters holding both."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_FIELDS)}")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor other than 1.0 is not supported")
    needed = _ROPE_FIELDS[kind]
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise UserError(f"{where}: rope type {kind!r} needs {', '.join(missing)} in rope_scaling")
    values = {name: scaling[name] for name in needed}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name in values:
            values[name] = float(values[name])
    return RopeConfig(theta=float(theta), type=kind, **values)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def parse_config(raw: dict[str, Any], where: str) -> BaseConfig:
    """BaseConfig of a LlamaForCausalLM. Raises UserError naming the field that is missing or not supported."""
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in required if name not in raw]
    if missing:
        raise UserError(f"{where}: missing {', '.join(missing)}")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise UserError(f"{where}: {name} true is not supported; expected a Llama without biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; expected 'silu'")
    if raw.get("quantization_config"):
        raise UserError(f"{where}: the base is already quantised (quantization_config); give its bf16 original")
    heads = raw["num_attention_heads"]
    return BaseConfig(
        family="llama",
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, where),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=_first(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
        pad_token_id=_first(raw.get("pad_token_id")),
    )


def config_json(config: BaseConfig) -> dict[str, Any]:
    """Content of a config.json that `parse_config` reads back as `config`."""
    scaling = {"rope_type": config.rope.type, **{k: getattr(config.rope, k) for k in _ROPE_FIELDS[config.rope.type]}}
    ends = config.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.type == "default" else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.torch_dtype,
    }


def name_rules(config: BaseConfig) -> list[NameRule]:
    """Every parameter, outside in. The head is absent when it is tied to the embedding."""
    rules = [NameRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")]
    for i in range(config.num_layers):
        core, hf = f"decoder.layers.{i}.", f"model.layers.{i}."
        attention = hf + "self_attn."
        qkv = (attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight")
        gate_up = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
        rules += [
            NameRule(core + "input_layernorm.weight", (hf + "input_layernorm.weight",), "replicated"),
            NameRule(core + "self_attention.linear_qkv.weight", qkv, "qkv"),
            NameRule(core + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), "columns"),
            NameRule(core + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), "replicated"),
            NameRule(core + "mlp.linear_fc1.weight", gate_up, "gate_up"),
            NameRule(core + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), "columns"),
        ]
    rules.append(NameRule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"))
    if not config.tie_word_embeddings:
        rules.append(NameRule("output_layer.weight", ("lm_head.weight",), "vocab"))
    return rules


def is_ignorable(name: str, config: BaseConfig) -> bool:
    """Tensors that a checkpoint may hold without meaning: rotary buffers of old files, a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
