"""Content of an exported DFlash or DSpark folder, as vLLM (qwen3_dflash, qwen3_dspark) and SGLang (dflash) load it.

Both are a stack of Qwen3 layers that uses the target's embedding and LM head. config.json lists captured layers by
output index from 0 (engines themselves add 1 for 'state after k layers'): in `dflash_config`, and for DSpark also at
the top level. No torch here.

H hidden size, K captured layers, V vocabulary, r rank of the Markov head.
"""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig

ARCHITECTURES = {"dflash": ["DFlashDraftModel"], "dspark": ["Qwen3DSparkModel"]}
SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_hidden_layers", "rms_norm_eps", "block_size", "num_target_layers",
)  # fmt: skip
"""Keys of config.json that are fields of BlockConfig."""


def unserved(config: BlockConfig, raw: dict[str, Any] | None = None) -> dict[str, str]:
    """Engine -> why it does not compute such a draft as trained.

    vLLM honours `causal`, SGLang (models/dflash.py) only a top-level `is_causal`. Without it SGLang, and TensorRT-LLM
    (models/modeling_dflash.py) always, derive the mask from `layer_types`: a slot sees its complete block in full
    attention, and only earlier slots under a window; so does vLLM without `causal`, which a draft of both therefore
    leaves out. TensorRT-LLM raises for a causal DSpark draft. Markov heads: vLLM and TensorRT-LLM implement the vanilla
    one, SGLang all three. A reduced draft vocabulary (LM head and d2t) is read by vLLM alone; the others use the
    target's LM head.

    Args:
        raw: the folder's config.json; None for the one written here.
    """
    found: dict[str, str] = {}
    window, declared = config.sliding_window is not None, raw is None or raw.get("is_causal") is not None
    if config.causal and not window:
        seen = "without a window its slots see their complete block, but this draft was trained causal"
        found |= (
            {"trtllm": seen} if declared else {"sglang": f"{seen}, and config.json has no is_causal", "trtllm": seen}
        )
    if not config.causal and window:
        seen = "with a window its slots see only earlier slots, but this draft was trained on the complete block"
        found |= {"sglang": seen, "trtllm": seen}
    elif window and raw is not None and "sliding_attention" not in (raw.get("layer_types") or ()):
        seen = "it finds the window of a layer in layer_types, which has none (tools/check_export.py --fix writes it)"
        found |= {"sglang": seen, "trtllm": seen}
    if config.rope.partial_rotary_factor != 1.0:
        found["sglang"] = "it rotates whole heads: transformers 5 moves partial_rotary_factor where it does not look"
    if config.causal and config.has_markov_head:
        found["trtllm"] = "it does not support causal DSpark drafts"
    if config.markov_head_type != "vanilla":
        head = f"it has no {config.markov_head_type} Markov head, only the vanilla one"
        found |= {"vllm": head, "trtllm": head}
    if config.own_head:
        found |= dict.fromkeys(("sglang", "trtllm"), "it knows no reduced vocabulary in a block draft")
    return found


def _kind_keys(config: BlockConfig) -> dict[str, Any]:
    ids, window = list(config.capture_layer_ids), config.sliding_window
    mixed = bool(config.full_attention_layers)
    inside = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids}
    if not (mixed and config.causal):  # the key is about all layers
        inside |= {"causal": config.causal}
    if window is not None:
        inside |= {"use_swa": True, "swa_window_size": window}
    layers = [config.mask_of(i)[1] for i in range(config.num_hidden_layers)]
    keys: dict[str, Any] = {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "layer_types": ["full_attention" if found is None else "sliding_attention" for found in layers],
        "use_sliding_window": window is not None,
        **({} if window is None else {"sliding_window": window}),
        "dflash_config": inside,
        **({"is_causal": True} if config.causal and not mixed else {}),  # the only key of it that SGLang reads
    }
    if config.has_markov_head:
        keys |= {
            "target_layer_ids": ids, "mask_token_id": config.mask_token_id, "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type, "enable_confidence_head": config.has_confidence_head,
        }  # fmt: skip
        if config.has_confidence_head:
            keys["confidence_head_with_markov"] = config.confidence_reads_markov
    return keys


def config_json(config: BlockConfig, base: BaseConfig, dtype: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Content of config.json without `quantization_config`. Contains no null.

    Args:
        rope: top-level keys of the rotary embedding.
    """
    eos = list(base.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": ARCHITECTURES[config.algorithm],
        "model_type": "qwen3",
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in SAME},
        **rope,
        **_kind_keys(config),
        "max_position_embeddings": max(config.max_position_embeddings, base.max_position_embeddings),
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": base.pad_token_id,
    }
    return {key: value for key, value in values.items() if value is not None}
