"""DFlash and DSpark drafts of z-lab, DeepSpec, SpecForge, speculators and ModelOpt. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, UserError
from megatron_spec.config.rope import read_rope
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export.block import SAME
from megatron_spec.export.formats.block_forms import algorithm_of, plain_form, tensor_name
from megatron_spec.export.formats.keys import LAYER, check_keys, other_layers
from megatron_spec.export.formats.reading import (
    DraftProblems,
    Problem,
    Reading,
    Source,
    checked,
    meaningless,
)
from megatron_spec.export.formats.vocabulary import read_vocabulary

_REASONS = {
    "confidence_": "config.json says that there is no confidence head (enable_confidence_head; in ModelOpt's files "
    "use_confidence_head)",
    "bias": "biases are not supported in a block draft",
}

_FAMILY = ("DFlash", "DSpark", "Domino")
"""Parts of the names of block drafts."""
_OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's in files of speculators."""
_IN_BLOCK = {"block_size", "num_target_layers"}
"""Keys that newer z-lab files keep in `dflash_config`."""
_IDS = {"mask_token_id", "target_layer_ids"}
_USED = LAYER | _IN_BLOCK | _IDS | {
    "dflash_config", "add_swa_attention_sink_bias", "is_causal", "is_neox_style", "rope_is_neox_style",
    "sample_from_anchor", "target_hidden_size",
}  # fmt: skip
_USED_DSPARK = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
_USED_INSIDE = _IN_BLOCK | _IDS | {
    "causal", "use_swa", "swa_window_size", "attention_sink_bias", "projector_type", "attention_mode",
    "sample_from_anchor",
}  # fmt: skip


class Block:
    """Reader of DFlash and DSpark: one stack of Qwen3 layers over a context of captures."""

    def matches(self, source: Source) -> bool:
        """By `architectures`, or `speculators_model_type`; also block drafts that are refused."""
        return algorithm_of(source.raw) is not None or (
            "speculators_model_type" not in source.raw and any(part in source.architectures for part in _FAMILY)
        )

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """See `Format`."""
        if algorithm_of(source.raw) is None:
            raise UserError(
                f"{source.folder}: found architectures {source.raw['architectures']} with model_type "
                f"{source.raw.get('model_type')!r}, a block draft of a kind that is not supported: expected DFlash "
                "(DFlashDraftModel) or DSpark (Qwen3DSparkModel, or DSparkDraftModel with model_type 'qwen3')"
            )
        if not isinstance(source.raw.get("dflash_config") or {}, dict):
            found = f"dflash_config is {source.raw['dflash_config']!r}"
            raise source.problem("config", found, "expected an object")
        try:
            source = replace(source, raw=plain_form(source.raw, base.num_layers if base is not None else None))
        except UserError as e:
            raise source.problem("config", f"config.json: {e}", "correct it") from None
        problems = _options(source.raw) + _unknown(source)
        if (source.folder / "mask_embedding.pt").is_file():
            found = "mask_embedding.pt holds an embedding of the mask token, which vLLM puts in place of the target's"
            problems.append(Problem("option", found, "not supported in a block draft"))
        if problems:
            raise DraftProblems(source.folder, problems)
        try:
            config = config_of(source.raw)
        except UserError as e:
            raise source.problem("config", f"config.json: {e}", "correct it") from None
        plain = {tensor_name(name): name for name in source.entries}
        names: dict[str, str | None] = {n: plain[n] for n in draft_tensors(config) if n in plain}
        unused = meaningless(source.entries)
        unused |= {plain[n]: "only trains on the target's" for n in _OF_TRAINING if n in plain}
        unused |= {plain[n]: "follows from d2t" for n in ("t2d",) if n in plain}
        reading = Reading(source, config, names, unused)
        for name in ("embed_tokens", "lm_head"):
            if f"{name}.weight" in plain and f"{name}.weight" not in names:
                reading.copy_of(name, plain[f"{name}.weight"])
        problems = read_vocabulary(reading, plain)
        if reading.d2t is not None and not config.own_head:
            problems.append(Problem("d2t", "d2t reorders the whole vocabulary", "not supported in a block draft"))
        return checked(reading, base, _REASONS, problems)


def _unknown(source: Source) -> list[Problem]:
    """Keys that are neither read nor harmless."""
    used = _USED | (_USED_DSPARK if algorithm_of(source.raw) == "dspark" else set())
    inside = {key: value for key, value in (source.raw.get("dflash_config") or {}).items() if value is not None}
    return check_keys(source, source.raw, used) + check_keys(source, inside, _USED_INSIDE, "dflash_config.")


def config_of(raw: dict[str, Any]) -> BlockConfig:
    """The architecture described by a config.json of any form. Raises UserError for missing or contradictory keys."""
    raw = plain_form(raw)
    inside = dict(raw.get("dflash_config") or {})
    values: dict[str, Any] = {"algorithm": algorithm_of(raw)}
    names = {key: key for key in SAME} | {"target_layer_ids": "capture_layer_ids", "mask_token_id": "mask_token_id"}
    for key, field in names.items():
        places = (raw, inside) if key in _IN_BLOCK | _IDS else (raw,)
        given = [x[key] for x in places if x.get(key) is not None]
        if not given:
            raise UserError(f"{key} is missing")
        if given[0] != given[-1]:
            raise UserError(f"{key} is {given[0]} at the top level and {given[1]} in dflash_config")
        values[field] = given[0]
    causal, window = _attention(raw, inside)
    if full := _full_layers(raw):
        values["full_attention_layers"] = full
    if raw.get("draft_vocab_size") is not None:
        values["draft_vocab_size"] = raw["draft_vocab_size"]
    rope = read_rope(raw, "config.json").to_dict()
    values |= {"rope": rope, "causal": causal, "sliding_window": window}
    if values["algorithm"] == "dspark":
        values["markov_rank"] = raw.get("markov_rank", 0)
        values["markov_head_type"] = raw.get("markov_head_type", "vanilla")
        values["confidence_head"] = bool(raw.get("enable_confidence_head", False))
        if values["confidence_head"]:  # others write the second option without a head, too
            values["confidence_reads_markov"] = bool(raw.get("confidence_head_with_markov", False))
    return BlockConfig.from_dict(values)


def _attention(raw: dict[str, Any], inside: dict[str, Any]) -> tuple[bool, int | None]:
    """(causal, window). With neither key set, sliding-attention layers are causal and `use_swa` is not (vLLM)."""
    listed = "sliding_attention" in (raw.get("layer_types") or ())
    causal = next((x for x in (raw.get("is_causal"), inside.get("causal")) if x is not None), listed)
    if not (listed or inside.get("use_swa")):
        return bool(causal), None
    return bool(causal), inside.get("swa_window_size", raw.get("sliding_window"))


def _full_layers(raw: dict[str, Any]) -> list[int]:
    """Layers of full attention beside sliding ones. Raises UserError unless there is one type for each layer."""
    types = raw.get("layer_types") or []
    if len(set(types)) < 2:
        return []
    if len(types) != raw.get("num_hidden_layers"):
        raise UserError(f"layer_types has {len(types)} entries for {raw.get('num_hidden_layers')} layers")
    return [i for i, kind in enumerate(types) if kind == "full_attention"]


def _options(raw: dict[str, Any]) -> list[Problem]:
    """Options in a config.json that this package does not support."""
    inside, kind = dict(raw.get("dflash_config") or {}), algorithm_of(raw)
    asked = {
        "biases": bool(raw.get("attention_bias") or raw.get("mlp_bias")),
        "attention sinks": bool(inside.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias")),
        f"a target_hidden_size of {raw.get('target_hidden_size')}": raw.get(
            "target_hidden_size", raw.get("hidden_size")
        )
        != raw.get("hidden_size"),
        "full attention to earlier slots alone beside sliding attention": len(set(raw.get("layer_types") or ())) > 1
        and True in (raw.get("is_causal"), inside.get("causal")),
        "a window without its size": _attention(raw, inside)[1] is None
        and ("sliding_attention" in (raw.get("layer_types") or ()) or bool(inside.get("use_swa"))),
        f"sliding_window {raw.get('sliding_window')} and swa_window_size {inside.get('swa_window_size')}, of which "
        "engines read one or the other": _attention(raw, inside)[1] is not None
        and not {raw.get("sliding_window"), inside.get("swa_window_size")} <= {None, _attention(raw, inside)[1]},
        "a rotary embedding of interleaved pairs": False in (raw.get("is_neox_style"), raw.get("rope_is_neox_style")),
        f"sample_from_anchor {kind != 'dspark'}": (kind != "dspark")
        in (raw.get("sample_from_anchor"), inside.get("sample_from_anchor")),
        f"projector_type {inside.get('projector_type')!r}": inside.get("projector_type", kind) != kind,
        f"attention_mode {inside.get('attention_mode')!r}": inside.get("attention_mode", "gqa")
        not in (
            "gqa",
            "mha",
        ),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "no rms_norm_eps or hidden_act": not {"rms_norm_eps", "hidden_act"} <= raw.keys(),
    }
    return other_layers(raw) + [
        Problem("option", f"found {what}", "not supported in a block draft") for what, there in asked.items() if there
    ]
