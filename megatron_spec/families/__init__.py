"""Base families: config.json here, without torch; names of tensors, for import and export, in `families.rules`."""

from __future__ import annotations

from pathlib import Path

from megatron_spec.config import BaseConfig, UserError, suggest
from megatron_spec.families.families import BY_ARCHITECTURE, BY_NAME, REFUSED, parse
from megatron_spec.families.types import check_config
from megatron_spec.families.written import config_json
from megatron_spec.runtime.files import model_json
from megatron_spec.runtime.hub import model_folder

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "architecture_of",
    "config_json",
    "draft_kind",
    "parse_base_config",
    "read_base_config",
    "refuse_draft",
]

SUPPORTED_ARCHITECTURES = tuple(BY_ARCHITECTURE)
_DRAFTS = (
    ("Eagle3", "EAGLE-3"),
    ("PEagle", "EAGLE-3"),
    ("Peagle", "EAGLE-3"),
    ("LlamaForCausalLMEagle", "EAGLE-1"),
    ("DFlash", "DFlash"),
    ("DSpark", "DSpark"),
    ("Medusa", "Medusa"),
    ("MTP", "MTP"),
)
"""Part of the name of a draft's architecture -> kind."""


def architecture_of(base: BaseConfig) -> str | None:
    """`architectures` of the base's config.json; None for a family of unknown name."""
    return BY_NAME[base.family].architecture if base.family in BY_NAME else None


def draft_kind(names: str) -> str | None:
    """Kind of draft of these architectures; None if they are not those of a draft."""
    return next((kind for part, kind in _DRAFTS if part in names), None)


def refuse_draft(architectures: object, where: str) -> None:
    """Raise UserError if the `architectures` of a config.json are those of a draft, where a whole model is expected."""
    names = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    if kind := draft_kind(names):
        raise UserError(
            f"{where}: found {names}, a draft ({kind}), expected a whole model: give the base that it was trained for"
        )


def parse_base_config(raw: dict[str, object], where: str) -> BaseConfig:
    """BaseConfig from the contents of a config.json; `where` names its source in errors.

    Raises UserError for an unknown architecture, a missing field, or a feature that is not supported.
    """
    original, raw = raw, check_config(raw, where)
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name in REFUSED:
        raise UserError(f"{where}: {name} is not supported as a base: it {REFUSED[name]}")
    if name not in BY_ARCHITECTURE:
        refuse_draft(architectures, where)
        hint = suggest(name, BY_ARCHITECTURE) if isinstance(name, str) else ""
        raise UserError(
            f"{where}: found architectures {architectures!r}, which is not supported as a base{hint}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    family = BY_ARCHITECTURE[name]
    absent = {"model_type": family.name, **family.absent}
    return parse(family, {**{key: value for key, value in absent.items() if key not in original}, **raw}, where)


def read_base_config(folder: str | Path) -> BaseConfig:
    """Architecture of the base in a Hugging Face folder, or of a model on the hub.

    Raises UserError if config.json is missing or the architecture is not supported.
    """
    path = model_folder(folder, weights=False)
    return parse_base_config(model_json(path), str(path / "config.json"))
