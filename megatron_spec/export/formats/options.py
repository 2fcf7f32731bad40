"""Options of a draft's config.json: every one that changes the result is implemented or refused. No torch."""

from __future__ import annotations

import logging
from typing import Any

from megatron_spec.export.formats.reading import Problem, Source

log = logging.getLogger(__name__)

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "engines' draft layers know silu alone: train with it"),
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
}
"""Key -> (values that change nothing, what to say of others)."""

NESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_aux_hidden_state": ((True,), "an EAGLE-3 draft that reads the last state alone is not supported"),
    "use_input_layernorm_in_first_layer": ((True,), "an EAGLE-3 draft without norms before attention is not supported"),
    "use_last_layernorm": ((True,), "an EAGLE-3 draft without a final norm is not supported"),
    "use_mtp_layernorm": ((False,), "norms before fc (use_mtp_layernorm) are not supported"),
    "next_layer_regular": ((True,), "later layers that read the embedding are not supported"),
    "parallel_draft_step": ((1,), "parallel draft heads are not supported: export the draft without them"),
    "has_lm_head": ((True,), "a draft without a head of its own is not supported"),
    "parallel_drafting": ((False,), "this is a draft that proposes all tokens in one pass"),
}
"""The same for `eagle_config`, ModelOpt's nested options of EAGLE-3."""
READ_NESTED = {"eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"}
IGNORED_NESTED = {"parallel_draft_heads_num_layers"}
"""Of heads that `parallel_draft_step` 1 does not have."""


PARALLEL_KEYS = ("ptd_token_id", "pard_token", "parallel_drafting")
"""Keys of config.json by which an EAGLE-3 draft is known that proposes all tokens in one pass (P-EAGLE)."""
MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""Its mask token, under the names of vLLM and of speculators."""


def check_options(source: Source, raw: dict[str, Any], eagle3: bool, parallel: bool = False) -> list[Problem]:
    """Options that change the result and are not implemented.

    Args:
        parallel: the draft is known as P-EAGLE.
    """
    nested = raw.get("eagle_config") or {}
    if parallel:
        raw = {key: value for key, value in raw.items() if key not in PARALLEL_KEYS}
        nested = {k: v for k, v in nested.items() if k not in PARALLEL_KEYS} if isinstance(nested, dict) else nested
    problems = _differing(raw, NEUTRAL, "")
    if not isinstance(nested, dict):
        return [*problems, Problem("config", f"eagle_config is {nested!r}", "expected an object")]
    nested = {key: value for key, value in nested.items() if value is not None}
    if eagle3:
        problems += _differing(nested, NESTED, "eagle_config.")
        unknown = sorted(nested.keys() - NESTED.keys() - READ_NESTED - IGNORED_NESTED)
        if unknown:
            found = f"eagle_config holds {', '.join(unknown)}, which is not known here"
            problems.append(Problem("option", found, "remove what does not change the draft"))
    return problems + ([] if eagle3 and draft_window(raw) else _window(raw))


def _differing(raw: dict[str, Any], known: dict[str, tuple[tuple[Any, ...], str]], where: str) -> list[Problem]:
    return [
        Problem("option", f"{where}{key} is {raw[key]!r}", why)
        for key, (neutral, why) in known.items()
        if key in raw and raw[key] not in neutral
    ]


def draft_window(raw: dict[str, Any]) -> int | None:
    """The window of a draft whose layers all have one; None where none is in use, or only some layers have it."""
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
