"""What the package knows of each base family: its config.json, and one table of parameter names used both ways."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_spec.base_models import llama
from megatron_spec.base_models.names import NameRule
from megatron_spec.config import BaseConfig, UserError, suggest

_FAMILIES = {"LlamaForCausalLM": llama}

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def parse_base_config(raw: dict[str, object], where: str) -> BaseConfig:
    """BaseConfig from the content of a config.json; `where` names its origin in errors.

    Raises UserError for an unknown architecture, a missing field, or a feature that is not supported.
    """
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in _FAMILIES:
        hint = suggest(name, _FAMILIES) if isinstance(name, str) else ""
        raise UserError(
            f"{where}: found architectures {architectures!r}, which is not supported as a base{hint}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return _FAMILIES[name].parse_config(raw, where)


def read_base_config(folder: str | Path) -> BaseConfig:
    """Architecture of the base in a Hugging Face folder. Raises UserError when it is missing or not supported."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise UserError(f"{folder}: found no config.json; expected a folder in Hugging Face format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON ({e}); copy the file again") from e
    if not isinstance(raw, dict):
        raise UserError(f"{path}: found {type(raw).__name__}, expected a JSON object")
    return parse_base_config(raw, str(path))


def config_json(config: BaseConfig) -> dict[str, object]:
    """Content of a config.json in Hugging Face format, for a base that came without one."""
    return llama.config_json(config)


def name_rules(config: BaseConfig) -> list[NameRule]:
    """Every parameter of the base, as megatron-core names it and as Hugging Face does."""
    return llama.name_rules(config)


def is_ignorable(name: str, config: BaseConfig) -> bool:
    """True for tensors that a checkpoint may hold without meaning."""
    return llama.is_ignorable(name, config)
