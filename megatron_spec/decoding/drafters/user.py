"""Drafters of the user's own: `module:Class`, derived from `Drafter` or with its methods."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.base import Drafter

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


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
    if not any(_takes(found, *arguments) for arguments in ((None, None), ())):
        raise UserError(
            f"--drafter {name}: {class_name}{inspect.signature(found)} can be made neither with (base, config) nor "
            "with nothing: expected a constructor of one of these kinds, or none"
        )
    return found


def _takes(found: type[Drafter], *arguments: object) -> bool:
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError:
        return False
    return True


def user_drafter(name: str, base: FrozenBase, config: DecodeConfig) -> Drafter:
    """An instance of the named class, made with (base, config), or with nothing when it takes nothing."""
    found: Any = find_drafter(name)
    made: Drafter = found(base, config) if _takes(found, base, config) else found()
    return made
