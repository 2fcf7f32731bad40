"""DFlash and DSpark drafts of z-lab, DeepSpec, SpecForge and ModelOpt. No torch."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, UserError
from megatron_spec.config.rope import read_rope
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export.block import ARCHITECTURES, SAME
from megatron_spec.export.formats.keys import LAYER, check_keys
from megatron_spec.export.formats.reading import (
    DraftProblems,
    Problem,
    Reading,
    Source,
    check_all,
    check_fits,
    integer,
    meaningless,
)

_REASONS = {
    "lm_head": "this draft uses the target's head; one of its own is not supported",
    "d2t": "a reduced draft vocabulary is not supported in a block draft",
    "bias": "biases are not supported in a block draft",
}

_IN_BLOCK = {"block_size", "num_target_layers"}
"""Newer files of z-lab hold them in `dflash_config`."""
_IDS = {"mask_token_id", "target_layer_ids"}
_USED = LAYER | _IN_BLOCK | _IDS | {"dflash_config", "add_swa_attention_sink_bias"}
_USED_DSPARK = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
_USED_INSIDE = _IN_BLOCK | _IDS | {
    "causal", "use_swa", "swa_window_size", "attention_sink_bias", "projector_type", "attention_mode",
}  # fmt: skip


class Block:
    """One stack of Qwen3 layers over a context of captures."""

    def matches(self, source: Source) -> bool:
        """By `architectures`."""
        return self._algorithm(source) is not None

    def _algorithm(self, source: Source) -> str | None:
        found = source.raw.get("architectures")
        return next((name for name, names in ARCHITECTURES.items() if names == found), None)

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """See `Format`."""
        inside = source.raw.get("dflash_config") or {}
        if not isinstance(inside, dict):
            raise source.problem("config", f"dflash_config is {inside!r}", "expected an object")
        inside = {key: value for key, value in inside.items() if value is not None}
        kind = self._algorithm(source)
        problems = _options(source.raw, inside, kind) + check_keys(
            source, source.raw, _USED | (_USED_DSPARK if kind == "dspark" else set())
        )
        problems += check_keys(source, inside, _USED_INSIDE, "dflash_config.")
        if problems:
            raise DraftProblems(source.folder, problems)
        config = self._config(source, inside)
        plain = {name.removeprefix("model."): name for name in source.entries}
        names: dict[str, str | None] = {n: plain[n] for n in draft_tensors(config) if n in plain}
        unused = meaningless(source.entries)
        for name in ("embed_tokens.weight",):
            if name in plain:
                unused[plain[name]] = "engines use the target's embedding"
        reading = Reading(source, config, names, unused, captures_given=True)
        problems = check_all(reading, _REASONS) or (check_fits(reading, base) if base is not None else [])
        if problems:
            raise DraftProblems(source.folder, problems)
        return reading

    def _config(self, source: Source, inside: dict[str, Any]) -> BlockConfig:
        raw = source.raw
        for key in sorted(_IDS | _IN_BLOCK):
            top = raw.get(key, inside.get(key))
            if top is None:
                raise source.problem("config", f"config.json lacks {key}", "copy it from the trained configuration")
            if inside.setdefault(key, top) != top:
                found = f"{key} is {top} at the top level and {inside[key]} in dflash_config"
                raise source.problem("config", found, "make them agree")
        raw = {**inside, **raw}
        sizes = {key: raw[key] if key in ("rms_norm_eps", "hidden_act") else integer(raw, key, source) for key in SAME}
        sliding = bool(inside.get("use_swa")) or "sliding_attention" in (raw.get("layer_types") or ())
        values = sizes | {
            "algorithm": self._algorithm(source), "mask_token_id": inside["mask_token_id"],
            "rope": read_rope(raw, str(source.folder / "config.json")).to_dict(),
            "capture_layer_ids": inside["target_layer_ids"], "causal": bool(inside.get("causal", False)),
            "sliding_window": inside.get("swa_window_size", raw.get("sliding_window")) if sliding else None,
        }  # fmt: skip
        if values["algorithm"] == "dspark":
            values["markov_rank"] = integer(raw, "markov_rank", source)
            values["confidence_reads_markov"] = bool(raw.get("confidence_head_with_markov", False))
        try:
            return BlockConfig.from_dict(values)
        except UserError as e:
            raise source.problem("config", f"config.json: {e}", "correct it") from None


def _options(raw: dict[str, Any], inside: dict[str, Any], kind: str | None) -> list[Problem]:
    """What a config.json asks for that this package has no draft for."""
    asked = {
        "biases": bool(raw.get("attention_bias") or raw.get("mlp_bias")),
        "attention sinks": bool(inside.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias")),
        "a reduced draft vocabulary": raw.get("draft_vocab_size", raw.get("vocab_size")) != raw.get("vocab_size"),
        "sliding and full attention in one draft": len(set(raw.get("layer_types") or ())) > 1,
        f"markov_head_type {raw.get('markov_head_type')!r}": raw.get("markov_head_type", "vanilla") != "vanilla",
        "DSpark without a confidence head": kind == "dspark" and not raw.get("enable_confidence_head", False),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        f"projector_type {inside.get('projector_type')!r}": inside.get("projector_type", kind) != kind,
        f"attention_mode {inside.get('attention_mode')!r}": inside.get("attention_mode", "gqa") != "gqa",
        "no rms_norm_eps or hidden_act": not {"rms_norm_eps", "hidden_act"} <= raw.keys(),
    }
    return [
        Problem("option", f"found {what}", "not supported in a block draft") for what, there in asked.items() if there
    ]
