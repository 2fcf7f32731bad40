"""Engines that compute a draft as trained; checked when a draft is created, not after training. No torch."""

from __future__ import annotations

from megatron_spec.config import BaseConfig, BlockConfig, DraftConfig, EagleConfig, UserError
from megatron_spec.config.rope import mscale
from megatron_spec.export import bases
from megatron_spec.export.block import unserved
from megatron_spec.export.layout import SERVED_BY, SERVED_EAGLE1, is_default_captures
from megatron_spec.families import architecture_of

ENGINES = ("trtllm", "vllm", "sglang")
TESTED_CAPTURES = 3


def check_exportable(config: DraftConfig, base: BaseConfig) -> list[str]:
    """Messages about engines that will not serve such a draft.

    Raises UserError for a draft that cannot be exported, or that no engine computes as trained.
    """
    if isinstance(config, BlockConfig):
        return _block(config, base)
    if not isinstance(config, EagleConfig) or config.of_base:
        return []
    _check_rope(config)
    options, engines = _options(config), engines_of(config)
    if not engines and not config.is_module:  # which no engine loads, whatever its options
        which = "such an EAGLE-1 draft" if config.regresses_state else "a draft with all of these"
        raise UserError(f"{' with '.join(options)}: no engine computes {which}: leave one out")
    limits = []
    if options and not config.is_module:
        limits.append(f"{', '.join(options)}: only {' and '.join(engines)} can serve such a draft")
    limits += _last_layer(config, base) + _of_base(config, base)
    if config.reads_captures and len(config.capture_layer_ids) != TESTED_CAPTURES:
        limits.append(
            f"this draft has {len(config.capture_layer_ids)} capture_layer_ids, and engines were only tested with "
            f"{TESTED_CAPTURES}: try yours before a long training"
        )
    if config.is_module:
        limits.append(
            "no engine loads an eagle-mtp draft of this base today: it can be trained, measured and exported only in a "
            "format of this package; eagle3 and medusa are served"
        )
    return limits


def _options(config: DraftConfig) -> list[str]:
    return [name for name in SERVED_BY if getattr(config, name, False)]


def engines_of(config: DraftConfig) -> list[str]:
    """Engines that compute all options of an EAGLE draft."""
    served = SERVED_BY | SERVED_EAGLE1 if config.regresses_state else SERVED_BY
    return [e for e in ENGINES if all(e in served[name] for name in _options(config))]


def _last_layer(config: EagleConfig | BlockConfig, base: BaseConfig) -> list[str]:
    last = base.num_layers - 1
    if last not in config.capture_layer_ids or bases.sglang_delivers_last_layer(architecture_of(base)):
        return []
    return [
        f"layer {last} is the base's last layer, whose output SGLang never delivers to a draft: capture earlier layers "
        "to serve with SGLang"
    ]


def _block(config: BlockConfig, base: BaseConfig) -> list[str]:
    _check_rope(config)
    lost = unserved(config)
    limits = [f"{engine} will not serve this draft as trained: {why}" for engine, why in lost.items()]
    if set(lost) == set(ENGINES):
        limits.append("no engine serves such a draft today: it can only be trained, measured and exported")
    return limits + _last_layer(config, base) + _of_base(config, base)


def lost_engines(config: EagleConfig | BlockConfig, base: BaseConfig) -> dict[str, str]:
    """Engine -> why it does not serve such a draft of this base: the draft's options, or the base."""
    if isinstance(config, BlockConfig):
        return {**unserved(config), **_with_base(config, base)}
    served, options = engines_of(config), ", ".join(_options(config))
    return {e: f"it does not compute {options}" for e in ENGINES if e not in served} | _with_base(config, base)


def _with_base(config: EagleConfig | BlockConfig, base: BaseConfig) -> dict[str, str]:
    if isinstance(config, BlockConfig):
        return bases.lost(architecture_of(base), "block")
    captures = None if is_default_captures(config, base.num_layers) else config.capture_layer_ids
    return bases.lost(architecture_of(base), "eagle3" if config.reads_captures else "eagle1", captures)


def _of_base(config: EagleConfig | BlockConfig, base: BaseConfig) -> list[str]:
    if isinstance(config, EagleConfig) and config.is_module:
        return []
    found = _with_base(config, base)
    limits = [f"{engine} will not serve this draft with this base: {why}" for engine, why in found.items()]
    if set(found) == set(ENGINES):
        limits.append("no engine serves such a draft of this base today: it can only be trained, measured and exported")
    return limits


def _check_rope(config: EagleConfig | BlockConfig) -> None:
    rope = config.rope
    if rope.type == "yarn" and rope.attention_factor != mscale(rope.factor):
        raise UserError(
            f"yarn with attention_factor {rope.attention_factor}: engines use {mscale(rope.factor):.6g} for factor "
            f"{rope.factor} regardless of a draft's config.json; leave attention_factor out (rope_scaling derives it)"
        )
