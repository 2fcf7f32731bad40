"""What an exported DFlash or DSpark folder contains, as vLLM (qwen3_dflash, qwen3_dspark) and SGLang (dflash) load it.

Both are a stack of Qwen3 layers without embedding and head, which are the target's. config.json names the captured
layers as outputs, from 0 (engines add 1 for 'state after k layers' themselves): in `dflash_config`, and for DSpark at
the top level too. No torch here.

H hidden size, K captured layers, V vocabulary, r rank of the Markov head.
"""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, RopeConfig, UserError

ARCHITECTURES = {"dflash": ["DFlashDraftModel"], "dspark": ["Qwen3DSparkModel"]}
_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_hidden_layers", "rms_norm_eps", "hidden_act", "block_size", "num_target_layers",
)  # fmt: skip
"""Keys of config.json that are fields of BlockConfig."""


def is_block_draft(raw: dict[str, Any]) -> bool:
    """True for the config.json of such a draft."""
    return raw.get("architectures") in ARCHITECTURES.values()


def layer_names(config: BlockConfig) -> list[str]:
    """Prefix of every layer."""
    return [f"layers.{i}" for i in range(config.num_hidden_layers)]


def weight_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file, with its shape."""
    H, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.capture_layer_ids) * H), "hidden_norm.weight": (H,), "norm.weight": (H,),
    }  # fmt: skip
    for layer in layer_names(config):
        one = {
            "input_layernorm": (H,), "post_attention_layernorm": (H,), "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,), "self_attn.q_proj": (queries, H), "self_attn.k_proj": (keys, H),
            "self_attn.v_proj": (keys, H), "self_attn.o_proj": (H, queries), "mlp.gate_proj": (F, H),
            "mlp.up_proj": (F, H), "mlp.down_proj": (H, F),
        }  # fmt: skip
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in one.items()}
    if config.algorithm == "dspark":
        table = (config.vocab_size, config.markov_rank)
        width = H + (config.markov_rank if config.confidence_reads_markov else 0)
        shapes |= {"markov_head.markov_w1.weight": table, "markov_head.markov_w2.weight": table}
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _kind_keys(config: BlockConfig) -> dict[str, Any]:
    ids, window = list(config.capture_layer_ids), config.sliding_window
    inside = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids, "causal": config.causal}
    if window is not None:
        inside |= {"use_swa": True, "swa_window_size": window}
    kind = "full_attention" if window is None else "sliding_attention"
    keys: dict[str, Any] = {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "layer_types": [kind] * config.num_hidden_layers,
        "use_sliding_window": window is not None,
        **({} if window is None else {"sliding_window": window}),
        "dflash_config": inside,
    }
    if config.algorithm == "dspark":
        keys |= {
            "target_layer_ids": ids, "mask_token_id": config.mask_token_id, "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }  # fmt: skip
    return keys


def config_json(config: BlockConfig, base: BaseConfig, dtype: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Content of config.json, without a `quantization_config`. Holds no null.

    Args:
        rope: top-level keys of the rotary embedding.
    """
    eos = list(base.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": ARCHITECTURES[config.algorithm],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _SAME},
        **rope,
        **_kind_keys(config),
        "max_position_embeddings": max(config.max_position_embeddings, base.max_position_embeddings),
        "draft_vocab_size": config.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": base.pad_token_id,
    }
    return {key: value for key, value in values.items() if value is not None}


def _unsupported(raw: dict[str, Any], inside: dict[str, Any], dspark: bool) -> list[str]:
    """What a config.json asks for that this package has no draft for."""
    found = []
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        found.append("biases")
    if inside.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"):
        found.append("attention sinks")
    if raw.get("draft_vocab_size", raw["vocab_size"]) != raw["vocab_size"]:
        found.append("a reduced draft vocabulary")
    if len(set(raw.get("layer_types") or ())) > 1:
        found.append("sliding and full attention in one draft")
    if dspark and raw.get("markov_head_type", "vanilla") != "vanilla":
        found.append(f"markov_head_type {raw['markov_head_type']!r}")
    if dspark and not raw.get("enable_confidence_head", False):
        found.append("a DSpark draft without confidence head")
    return found


def read_config_json(raw: dict[str, Any], rope: RopeConfig) -> BlockConfig:
    """The BlockConfig of an exported config.json.

    Raises UserError on a missing key, on contradicting ones, and on what this package has no draft for.
    """
    algorithm = next(name for name, found in ARCHITECTURES.items() if found == raw["architectures"])
    inside = dict(raw.get("dflash_config") or {})
    for key in ("target_layer_ids", "mask_token_id"):
        top = raw.get(key, inside.get(key))
        if inside.setdefault(key, top) != top:
            raise UserError(f"config.json: {key} is {top} at the top level and {inside[key]} in dflash_config")
    missing = [key for key in _SAME if key not in raw]
    missing += [key for key in ("target_layer_ids", "mask_token_id") if inside[key] is None]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}")
    strange = _unsupported(raw, inside, algorithm == "dspark")
    if strange:
        raise UserError(f"config.json: a draft with {', '.join(strange)} is not supported")
    sliding = bool(inside.get("use_swa")) or "sliding_attention" in (raw.get("layer_types") or ())
    window = inside.get("swa_window_size", raw.get("sliding_window")) if sliding else None
    values = {key: raw[key] for key in _SAME} | {
        "algorithm": algorithm, "mask_token_id": inside["mask_token_id"], "rope": rope,
        "capture_layer_ids": inside["target_layer_ids"], "causal": bool(inside.get("causal", False)),
        "sliding_window": window,
    }  # fmt: skip
    if algorithm == "dspark":
        values["markov_rank"] = raw.get("markov_rank", 0)
        values["confidence_reads_markov"] = bool(raw.get("confidence_head_with_markov", False))
    return BlockConfig.from_dict(values)
