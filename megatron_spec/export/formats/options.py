"""Options of a draft's config.json: each option that changes the result is implemented or refused. No torch."""

from __future__ import annotations

from typing import Any

from megatron_spec.config.draft import READS_CAPTURES
from megatron_spec.export.formats.keys import CONTAINERS, LAYER, check_keys, other_layers
from megatron_spec.export.formats.reading import Problem, Source

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "the draft layers of engines support only silu: train with it"),
    "logit_scale": ((1, 1.0), "scaled logits are not supported"),
    "logits_scaling": ((1, 1.0), "scaled logits are not supported"),
    "embedding_multiplier": ((1, 1.0), "scaled embeddings are not supported"),
    "residual_multiplier": ((1, 1.0), "a scaled residual stream is not supported"),
    "attention_multiplier": ((), "another scale of attention scores is not supported"),
    "query_pre_attn_scalar": ((), "another scale of attention scores is not supported"),
    "scale_emb": ((1, 1.0), "scaled embeddings are not supported"),
    "scale_depth": ((), "a scaled residual stream is not supported"),
    "attn_logit_softcapping": ((), "soft-capped scores are not supported"),
    "final_logit_softcapping": ((), "soft-capped logits are not supported"),
    "is_causal": ((True,), "attention to later tokens is not supported"),
    "parallel_drafting": ((False,), "this is a draft that proposes all tokens in one pass"),
    "add_para_norm": ((False,), "norms before fc of an EAGLE-1 draft (HASS) are not supported"),
    "layernorms": ((False,), "norms before fc of an EAGLE-1 draft (HASS) are not supported"),
    "fusion_bias": ((True, False), ""),
    "transformer_layer_architecture": (
        ("LlamaDecoderLayer", "auto"),
        "the draft layers of engines are Llama's: train with them",
    ),
}
"""Key -> (values that change nothing, message for other values)."""

NESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_aux_hidden_state": ((True,), "an EAGLE-3 draft that reads only the last state is not supported"),
    "use_input_layernorm_in_first_layer": ((True,), "an EAGLE-3 draft without norms before attention is not supported"),
    "use_last_layernorm": ((True,), "an EAGLE-3 draft without a final norm is not supported"),
    "use_mtp_layernorm": ((False,), "norms before fc (use_mtp_layernorm) are not supported"),
    "next_layer_regular": ((True,), "later layers that read the embedding are not supported"),
    "parallel_draft_step": ((1,), "parallel draft heads are not supported: export the draft without them"),
    "has_lm_head": ((True,), "a draft without an LM head of its own is not supported"),
    "parallel_drafting": ((False,), "this is a draft that proposes all tokens in one pass"),
}
"""The same for `eagle_config`, ModelOpt's nested options of EAGLE-3."""
PLAIN_NESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_aux_hidden_state": ((False,), "an EAGLE-1 draft reads the last state"),
    "use_input_layernorm_in_first_layer": ((False,), "engines have no norm before the first layer of EAGLE-1"),
    "use_last_layernorm": ((False,), "an EAGLE-1 draft has no final norm"),
    "has_lm_head": ((False,), "this draft uses the target's LM head"),
    **{key: NESTED[key] for key in ("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step",
                                    "parallel_drafting")},
}  # fmt: skip
"""The same for EAGLE-1, which reads the last state."""
_NESTED: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "p-eagle": {key: value for key, value in NESTED.items() if key != "parallel_drafting"},
    "eagle3": NESTED, "eagle1": PLAIN_NESTED, "eagle-mtp": {},
}  # fmt: skip
PARALLEL_KEYS = ("ptd_token_id", "pard_token", "parallel_drafting")
"""Keys of config.json that mark an EAGLE-3 draft which proposes all tokens in one pass (P-EAGLE)."""
COUNT_KEYS = ("num_aux_hidden_states", "num_aux_layers")
"""vLLM's and SGLang's keys of the number of captures."""
MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""Keys of P-EAGLE's mask token in vLLM and speculators."""
_IDS = {"eagle_aux_hidden_state_layer_ids"}
_EAGLE3 = {"norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "target_hidden_size"} | _IDS
_USED: dict[str, set[str]] = {
    "eagle3": _EAGLE3 | {"eagle_config", *COUNT_KEYS},
    "p-eagle": _EAGLE3 | {"eagle_config", *COUNT_KEYS, *PARALLEL_KEYS, *MASK_TOKEN_KEYS},
    "eagle1": {"eagle_config", "target_hidden_size", "truncated_vocab_size"},
    "eagle-mtp": {"eagle_config", "norm_output", "target_hidden_size", "num_nextn_predict_layers"},
}
"""Kind -> keys of config.json, other than those of its layers, that the reader reads."""
_USED_NESTED = {
    "eagle3": _EAGLE3 - {"target_hidden_size"},
    "p-eagle": _EAGLE3 - {"target_hidden_size"} | {"parallel_drafting"},
    "eagle1": set(), "eagle-mtp": {"norm_output"},
}  # fmt: skip
_HEADS = {"parallel_draft_heads_num_layers"}
"""Keys of parallel draft heads, which do not exist with `parallel_draft_step` 1."""


def check_options(source: Source, raw: dict[str, Any], kind: str) -> list[Problem]:
    """Problems: unsupported options that change the result, and unknown keys.

    Args:
        raw: config.json with nested layer descriptions at the top level (`keys.flatten`).
        kind: 'eagle3', 'p-eagle', 'eagle1' or 'eagle-mtp'.
    """
    neutral = {key: value for key, value in NEUTRAL.items() if key not in _USED[kind]}
    problems = _differing(raw, neutral, "") + _vocabularies(raw, kind) + other_layers(raw)
    problems += [] if kind in READS_CAPTURES and draft_window(raw) else _window(raw)
    used = LAYER | NEUTRAL.keys() | _USED[kind] | (set(CONTAINERS) if raw is not source.raw else set())
    problems += check_keys(source, raw, used)
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        return [*problems, Problem("config", f"eagle_config is {nested!r}", "expected an object")]
    nested = {key: value for key, value in nested.items() if value is not None}
    known = _NESTED[kind]
    problems += _differing(nested, known, "eagle_config.")
    return problems + check_keys(source, nested, known.keys() | _USED_NESTED[kind] | _HEADS, "eagle_config.")


def _vocabularies(raw: dict[str, Any], kind: str) -> list[Problem]:
    """Problems of a reduced vocabulary in a draft that uses the target's LM head."""
    keys = ("draft_vocab_size", "truncated_vocab_size") if kind not in READS_CAPTURES else ()
    return [
        Problem("option", f"{key} is {raw[key]}, vocab_size {raw.get('vocab_size')}",
                "a reduced vocabulary in a draft of this kind is not supported")
        for key in keys if raw.get(key) not in (None, raw.get("vocab_size"))
    ]  # fmt: skip


def _differing(raw: dict[str, Any], known: dict[str, tuple[tuple[Any, ...], str]], where: str) -> list[Problem]:
    return [
        Problem("option", f"{where}{key} is {raw[key]!r}", why)
        for key, (neutral, why) in known.items()
        if key in raw and raw[key] not in neutral
    ]


def draft_window(raw: dict[str, Any]) -> int | None:
    """Window of a draft, if all of its layers have one; None if no layer or only some layers use it."""
    types = raw.get("layer_types") or []
    return raw["sliding_window"] if _window_used(raw) and set(types) == {"sliding_attention"} else None


def _window_used(raw: dict[str, Any]) -> bool:
    window = raw.get("sliding_window")
    return bool(raw.get("use_sliding_window", True) and window and window < raw.get("max_position_embeddings", 2048))


def _window(raw: dict[str, Any]) -> list[Problem]:
    types = raw.get("layer_types") or []
    if _window_used(raw) and (not types or "sliding_attention" in types):
        why = 'it is supported for EAGLE-3 drafts whose layer_types are all "sliding_attention"'
        return [Problem("option", f"sliding_window is {raw['sliding_window']}", why)]
    return []
