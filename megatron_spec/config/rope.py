"""Rotary embedding of a config.json, for bases and drafts: read into `RopeConfig` and written back."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from megatron_spec.config.base import BaseConfig, RopeConfig
from megatron_spec.config.core import UserError, suggest

log = logging.getLogger(__name__)

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Required keys of rope_scaling, by supported type."""
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}
"""Other keys that are read, by type."""
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_WITHOUT_EFFECT = (
    "original_max_position_embeddings",  # read by the types that require it; transformers writes it for others, too
    "finetuned",  # of the authors of YaRN: how the weights were made
    # Sections of a head get the positions of time, height and width, which are all the same in text.
    "mrope_section",
    "mrope_interleaved",
)
"""Keys that change nothing for text."""

_POSITIVE = (
    "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "attention_factor",
)  # fmt: skip
_AT_LEAST_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys for which 0 counts as absent."""

_DEFAULT_THETA = {"mixtral": 1e6, "gpt_oss": 150000.0}
"""Default theta by model_type; 10000 for all others, as in transformers."""

_SPELLINGS = {"su": "longrope"}
"""Former names of types."""


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention scores with the context (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_values(raw: dict[str, Any]) -> dict[str, Any]:
    """Old files: rope_theta + rope_scaling; transformers 5: rope_parameters with both.

    With transformers' precedence: rope_scaling before rope_parameters, without merging; top-level fields fill gaps,
    except original_max_position_embeddings, which takes precedence.
    """
    values = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            values.setdefault(name, raw[name])
    values.setdefault("rope_theta", _DEFAULT_THETA.get(str(raw.get("model_type")), 10000.0))
    if raw.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return values


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


def read_rope(raw: dict[str, Any], where: str) -> RopeConfig:
    """Rotary embedding of a config.json. Raises UserError for an unknown type and for missing fields."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(name) or {}, dict):
            raise UserError(f"{where}: {name} is {raw[name]!r}, expected an object or null")
    values = rope_values(raw)
    _warn_of_contradiction(raw, values, where)
    kind: Any = values.get("rope_type", values.get("type", "default"))
    kind = _SPELLINGS.get(str(kind), kind)
    if str(kind) not in ROPE_FIELDS:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}")
    missing = [name for name in ROPE_FIELDS[kind] if values.get(name) is None]
    if missing:
        raise UserError(f"{where}: rope type {kind!r} needs {', '.join(missing)} in rope_scaling")
    if kind == "default" and "factor" in values and not {"rope_type", "type"} & values.keys():
        raise UserError(f"{where}: rope_scaling has a factor ({values['factor']}) but no rope_type: write the type")
    _check_keys(kind, values, where)
    _check_numbers(values, where)
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


def _check_keys(kind: str, values: dict[str, Any], where: str) -> None:
    """Raise UserError for a key that this type does not read: it may change the angles."""
    read = {*_ALWAYS, *ROPE_FIELDS[kind], *_OPTIONAL.get(kind, ())}
    unknown = sorted(
        name
        for name, value in values.items()
        if value is not None and name not in read | {*_WITHOUT_EFFECT} and (value or name not in _AT_LEAST_ZERO)
    )
    if unknown:
        raise UserError(
            f"{where}: rope type {kind!r} has no {', '.join(unknown)}{suggest(unknown[0], read)}: a rotary embedding "
            "with it is not supported; remove what has no effect"
        )


def _check_numbers(values: dict[str, Any], where: str) -> None:
    for name in _POSITIVE + _AT_LEAST_ZERO:
        value, least = values.get(name), "positive" if name in _POSITIVE else "non-negative"
        if value is not None and not (_is_number(value) and (value > 0 or (value == 0 and name in _AT_LEAST_ZERO))):
            raise UserError(f"{where}: {name} is {value!r}, expected a {least} number")
    if values.get("partial_rotary_factor", 1.0) > 1:
        raise UserError(f"{where}: partial_rotary_factor is {values['partial_rotary_factor']}, expected at most 1")
    for name in ("short_factor", "long_factor"):
        factors = values.get(name) or []
        if not isinstance(factors, list | tuple) or not all(_is_number(x) and x > 0 for x in factors):
            raise UserError(f"{where}: {name} is {str(factors)[:60]}, expected a list of positive numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _warn_of_contradiction(raw: dict[str, Any], values: dict[str, Any], where: str) -> None:
    """Of fields that name the same thing and differ from what is read; once a file."""
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
            f"{where}: rope_scaling, rope_parameters and the fields beside them contradict one another; like "
            f"transformers, this uses {used}, not {differ}: remove what is wrong"
        )


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def rope_scaling_json(rope: RopeConfig) -> dict[str, Any] | None:
    """`rope_scaling` of this embedding, None for the default; the inverse of `read_rope`."""
    if rope.type == "default":
        return None
    found: dict[str, Any] = {"rope_type": rope.type, **{name: getattr(rope, name) for name in ROPE_FIELDS[rope.type]}}
    if rope.type == "longrope":
        found |= {name: list(found[name]) for name in ("short_factor", "long_factor")}
    if rope.type in ("yarn", "longrope"):
        found["attention_factor"] = rope.attention_factor
    if rope.type == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor == mscale(rope.factor):
            del found["attention_factor"]  # engines derive it from the factor and ignore the key
    return found


def rope_overrides(base: BaseConfig, overrides: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary embedding of a new draft, as a dictionary: the base's, with `rope_theta` and `rope_scaling`.

    Raises UserError for unknown keys and values of another type. Args: where: the file of the overrides.
    """
    for name, kinds in (("rope_theta", (int, float)), ("rope_scaling", (dict, type(None)))):
        if name in overrides and not isinstance(overrides[name], kinds):
            expected = "a number" if name == "rope_theta" else "an object or null"
            raise UserError(f"{where}: {name} is {overrides[name]!r}, expected {expected}")
    theta = float(overrides.get("rope_theta", base.rope.theta))
    # yarn, longrope and partial rotation belong to the base's training: a new draft has a default rotary embedding.
    plain = base.rope.type in ("yarn", "longrope") or base.rope.partial_rotary_factor != 1.0
    rope = RopeConfig(theta=theta) if plain else base.rope.replace(theta=theta)
    if "rope_scaling" not in overrides:
        return rope.to_dict()
    scaling = dict(overrides["rope_scaling"] or {})
    known = {*RopeConfig.__dataclass_fields__, "rope_type", "mscale", "mscale_all_dim"} - {"theta"}
    for key in scaling.keys() - known:
        raise UserError(f"{where}: rope_scaling has unknown key {key!r}{suggest(key, known)}")
    kind = scaling.pop("type", None)
    if scaling or kind:
        scaling["rope_type"] = scaling.get("rope_type", kind or rope.type)
    if scaling and scaling["rope_type"] == rope.type:  # missing fields are the base's
        scaling = {**(rope_scaling_json(rope) or {}), **scaling}
    return read_rope({"rope_theta": theta, "rope_scaling": scaling}, where).to_dict()
