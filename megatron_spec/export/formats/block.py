"""DFlash and DSpark drafts of z-lab, DeepSpec, SpecForge and ModelOpt. No torch."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig, BlockConfig, UserError
from megatron_spec.config.rope import read_rope
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export.block import ARCHITECTURES, SAME
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
        inside = dict(source.raw.get("dflash_config") or {})
        problems = _options(source.raw, inside, self._algorithm(source) == "dspark")
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
        for key in ("target_layer_ids", "mask_token_id"):
            top = raw.get(key, inside.get(key))
            if top is None:
                raise source.problem("config", f"config.json lacks {key}", "copy it from the trained configuration")
            if inside.setdefault(key, top) != top:
                found = f"{key} is {top} at the top level and {inside[key]} in dflash_config"
                raise source.problem("config", found, "make them agree")
        sizes = {key: raw[key] if key == "rms_norm_eps" else integer(raw, key, source) for key in SAME}
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


def _options(raw: dict[str, Any], inside: dict[str, Any], dspark: bool) -> list[Problem]:
    """What a config.json asks for that this package has no draft for."""
    asked = {
        "biases": bool(raw.get("attention_bias") or raw.get("mlp_bias")),
        "attention sinks": bool(inside.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias")),
        "a reduced draft vocabulary": raw.get("draft_vocab_size", raw.get("vocab_size")) != raw.get("vocab_size"),
        "sliding and full attention in one draft": len(set(raw.get("layer_types") or ())) > 1,
        f"markov_head_type {raw.get('markov_head_type')!r}": raw.get("markov_head_type", "vanilla") != "vanilla",
        "DSpark without a confidence head": dspark and not raw.get("enable_confidence_head", False),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "no rms_norm_eps or hidden_act": not {"rms_norm_eps", "hidden_act"} <= raw.keys(),
    }
    return [
        Problem("option", f"found {what}", "not supported in a block draft") for what, there in asked.items() if there
    ]
