"""Drafters of the user's own: `module:Class`, derived from `Drafter` or with its methods."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.base import Drafter

if TYPE_CHECKING:
    from megatron_spec.pipeline.model import FrozenBase


def find_drafter(name: str) -> type[Drafter]:
    """The class that `module:Class` names; the module must be importable. Raises UserError otherwise."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise UserError(f"--drafter {name!r}: expected module:Class, for example my_drafters:Repeat")
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise UserError(f"--drafter {name}: {module_name} cannot be imported ({e}); is it on PYTHONPATH?") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, Drafter):
        raise UserError(
            f"--drafter {name}: found {found!r}, expected a class derived from megatron_spec.decoding.drafters.Drafter"
        )
    return found


def user_drafter(name: str, base: FrozenBase, config: DecodeConfig) -> Drafter:
    """An instance of the named class, made with (base, config)."""
    return find_drafter(name)(base, config)  # type: ignore[call-arg]
