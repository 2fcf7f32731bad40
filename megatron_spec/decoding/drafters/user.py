"""Drafters of the user's own: `module:Class`, derived from `Drafter` or with its methods."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.base import Drafter, Proposal

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


def is_foreign(drafter: Drafter | None) -> bool:
    """True for a class from outside of this package, whose proposals are looked at before the base reads them.

    False where that is impossible: in a CUDA graph (`fixed_shapes`).
    """
    if drafter is None or drafter.fixed_shapes:
        return False
    return not type(drafter).__module__.startswith(f"{__package__}.")


def check_proposal(proposal: Proposal, batch: int, vocab_size: int, drafter: Drafter) -> None:
    """Raise UserError for tokens that are no [batch, nodes] int64 ids of the base's vocabulary. Waits for a GPU."""
    tokens_BN, name = proposal.tokens_BN, type(drafter).__name__
    if tokens_BN.dtype != torch.int64 or tokens_BN.dim() != 2 or len(tokens_BN) != batch:
        raise UserError(
            f"drafter {name} proposed {tokens_BN.dtype} of shape {list(tokens_BN.shape)}, expected int64 [{batch}, "
            "nodes]: one row of token ids for every running sequence"
        )
    outside_BN = (tokens_BN < 0) | (tokens_BN >= vocab_size)
    if bool(outside_BN.any()):
        row, node = outside_BN.nonzero()[0].tolist()
        raise UserError(
            f"drafter {name} proposed token id {int(tokens_BN[row, node])} (row {row}, place {node}), expected 0 to "
            f"{vocab_size - 1}, the base's vocabulary: use the base's tokenizer in the drafter; places that "
            "do not count (proposed_B) hold ids, too"
        )
