"""Fields of a config.json that all families share -> arguments of BaseConfig."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from megatron_spec.config import RopeConfig, UserError

log = logging.getLogger(__name__)

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""What rope_scaling must hold, by supported type."""

_DEFAULT_THETA = {"mixtral": 1e6, "gpt_oss": 150000.0}
"""By model_type, where a config.json gives none; 10000 for all others, as in transformers."""

_SPELLINGS = {"su": "longrope"}
"""Old names of types."""


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention scores with the context (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_values(raw: dict[str, Any]) -> dict[str, Any]:
    """Old files: rope_theta + rope_scaling; transformers 5: rope_parameters holding both.

    With transformers' precedence: rope_scaling before rope_parameters, which is not merged with it; the fields beside
    them fill gaps, but for the original number of positions, which wins.
    """
    values = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    default_theta = _DEFAULT_THETA.get(str(raw.get("model_type")), 10000.0)
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            values.setdefault(name, raw[name])
    values.setdefault("rope_theta", default_theta)
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        values["original_max_position_embeddings"] = original
    return values


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _say_contradiction(raw: dict[str, Any], values: dict[str, Any], where: str) -> None:
    """Warn, once a file, of fields that name the same thing and differ from what is read."""
    scaling, parameters = (raw.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    other = dict(parameters) if scaling else {}
    other |= {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if raw.get(name) is not None}
    kind = other.pop("type", None)
    other.setdefault("rope_type", kind or ("default" if scaling and parameters else None))
    read = {"rope_type": values.get("type", "default"), **values}
    differ = {name: x for name, x in other.items() if x is not None and name in read and read[name] != x}
    if differ:
        used = {name: read[name] for name in differ}
        _warn_once(
            f"{where}: rope_scaling, rope_parameters and the fields beside them disagree; as in transformers {used} "
            f"is used, not {differ}: remove what does not hold"
        )


def _attention_factor(kind: str, values: dict[str, Any], raw: dict[str, Any]) -> float:
    given = values.get("attention_factor")
    if given is not None:
        return float(given)
    original = values["original_max_position_embeddings"]
    factor = values.get("factor") or raw.get("max_position_embeddings", original) / original
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(factor, values["mscale"]) / mscale(factor, values["mscale_all_dim"])
    return mscale(factor)


def rope(raw: dict[str, Any], where: str) -> RopeConfig:
    """Rotary embedding of a config.json. Raises UserError for a type that is not known or lacks fields."""
    values = rope_values(raw)
    _say_contradiction(raw, values, where)
    kind = values.get("rope_type", values.get("type", "default"))
    kind = _SPELLINGS.get(kind, kind)
    if kind not in ROPE_FIELDS:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}")
    missing = [name for name in ROPE_FIELDS[kind] if values.get(name) is None]
    if missing:
        raise UserError(f"{where}: rope type {kind!r} needs {', '.join(missing)} in rope_scaling")
    found: dict[str, Any] = {name: values[name] for name in ROPE_FIELDS[kind]}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name in found:
            found[name] = float(found[name])
    if kind == "longrope":
        found |= {name: tuple(map(float, found[name])) for name in ("short_factor", "long_factor")}
    if kind in ("yarn", "longrope"):
        found["attention_factor"] = _attention_factor(kind, values, raw)
    if kind == "yarn":
        found |= {name: float(values[name]) for name in ("beta_fast", "beta_slow") if values.get(name)}
        found["truncate"] = bool(values.get("truncate", True))
    return RopeConfig(
        theta=float(values["rope_theta"]), type=kind,
        partial_rotary_factor=float(values.get("partial_rotary_factor", 1.0)), **found,
    )  # fmt: skip


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def require(raw: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise UserError naming the fields that are missing."""
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise UserError(f"{where}: missing {', '.join(missing)}")


def refuse_true(raw: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise UserError for the first field that is set."""
    for name in names:
        if raw.get(name):
            raise UserError(f"{where}: {name} {raw[name]!r} is not supported for this family")


def window(size: int | None, layers: tuple[int, ...], positions: int) -> dict[str, Any]:
    """Sliding window of some layers; one that covers every position is none."""
    if not size or size >= positions or not layers:
        return {}
    return {"window": size, "window_layers": layers}


def all_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of all layers."""
    return tuple(range(raw["num_hidden_layers"]))


def common(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Arguments of BaseConfig that every family has. Raises UserError naming what is missing or not supported."""
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    require(raw, needed, where)
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; expected 'silu'")
    heads = raw["num_attention_heads"]
    return dict(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope(raw, where),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=_first(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
        pad_token_id=_first(raw.get("pad_token_id")),
    )


def fp8_block(quantization_config: dict[str, Any], where: str) -> tuple[int, int]:
    """(rows, columns) under one scale of weights in fp8 by blocks. Raises UserError for another kind of fp8."""
    size = quantization_config.get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise UserError(
            f"{where}: the base is already quantised (fp8 with weight_block_size {size!r}; expected two numbers, "
            "128 x 128 in DeepSeek's files); give its bf16 original"
        )
    if quantization_config.get("fmt", "e4m3") != "e4m3":
        raise UserError(f"{where}: fp8 of the kind {quantization_config['fmt']!r} is not supported; expected 'e4m3'")
    return size[0], size[1]
