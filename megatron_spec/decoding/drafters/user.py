"""User-defined drafters: `module:Class`, a class derived from `Drafter`."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.base import Drafter, Proposal

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


def find_drafter(name: str) -> type[Drafter]:
    """Import the class `module:Class`. Raises UserError if that fails or it is not a drafter."""
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
            f"--drafter {name}: found the constructor {class_name}{inspect.signature(found)}, expected one that takes "
            "(base, config) or no arguments"
        )
    return found


def _takes(found: type[Drafter], *arguments: object) -> bool:
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError:
        return False
    return True


def user_drafter(name: str, base: FrozenBase, config: DecodeConfig) -> Drafter:
    """An instance of the named class, constructed with (base, config), or without arguments if it takes none."""
    found: Any = find_drafter(name)
    made: Drafter = found(base, config) if _takes(found, base, config) else found()
    return made


def is_foreign(drafter: Drafter | None) -> bool:
    """True if proposals are checked before the base reads them: for a class from outside this package.

    False for a drafter with `fixed_shapes`, because a check cannot run in a CUDA graph.
    """
    if drafter is None or drafter.fixed_shapes:
        return False
    return not type(drafter).__module__.startswith(f"{__package__}.")


def check_proposal(
    proposal: Any, batch: int, vocab_size: int, drafter: Drafter, longest: int, count: int
) -> None:  # fmt: skip
    """Raise UserError for a proposal that the base cannot verify. Synchronises with a GPU.

    Args:
        longest: maximum draft length, for which there is room.
        count: the draft length asked for, less at the end of an answer. A longer chain is cut, a tree is not.
    """
    name = f"drafter {type(drafter).__name__}"
    if not isinstance(proposal, Proposal):
        raise UserError(f"{name} returned {type(proposal).__name__}, expected megatron_spec.decoding.drafters.Proposal")
    _check_tokens(proposal, batch, vocab_size, name)
    nodes, most = proposal.tokens_BN.shape[1], max(drafter.max_nodes(longest), longest)
    if nodes > most:
        raise UserError(
            f"{name} proposed {nodes} nodes, expected at most {most}: propose `count` tokens, or override max_nodes"
        )
    counts_B, parents_BN = proposal.proposed_B, proposal.parents_BN
    if counts_B is not None and counts_B.shape != (batch,):
        raise UserError(f"{name}: found proposed_B of shape {list(counts_B.shape)}, expected [{batch}]")
    if parents_BN is not None:
        _check_tree(parents_BN, proposal.tokens_BN, count, name)


def _check_tokens(proposal: Proposal, batch: int, vocab_size: int, name: str) -> None:
    """int64 ids [batch, nodes] of the base's vocabulary."""
    tokens_BN = proposal.tokens_BN
    if tokens_BN.dtype != torch.int64 or tokens_BN.dim() != 2 or len(tokens_BN) != batch:
        raise UserError(
            f"{name} proposed {tokens_BN.dtype} of shape {list(tokens_BN.shape)}, expected int64 [{batch}, "
            "nodes]: one row of token ids for every running sequence"
        )
    outside_BN = (tokens_BN < 0) | (tokens_BN >= vocab_size)
    if bool(outside_BN.any()):
        row, node = outside_BN.nonzero()[0].tolist()
        raise UserError(
            f"{name} proposed token id {int(tokens_BN[row, node])} (row {row}, node {node}), expected 0 to "
            f"{vocab_size - 1}, the base's vocabulary: use the base's tokenizer in the drafter; nodes that are not "
            "valid (proposed_B) need ids of the vocabulary, too"
        )


def _check_tree(parents_BN: Tensor, tokens_BN: Tensor, count: int, name: str) -> None:
    """Parents come before their children, down to the depth that is drafted."""
    if parents_BN.dtype != torch.int64 or parents_BN.shape != tokens_BN.shape:
        raise UserError(
            f"{name}: found parents_BN of {parents_BN.dtype} {list(parents_BN.shape)}, expected int64 "
            f"{list(tokens_BN.shape)}, as tokens_BN"
        )
    for row, parents in enumerate(parents_BN.tolist()):
        depths = [0]  # of the last known token, then of the nodes
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise UserError(
                    f"{name}: node {node} of row {row} has the parent {parent}, expected -1 (the last known token) or "
                    "an earlier node"
                )
            depths.append(depths[parent + 1] + 1)
        if max(depths) > count:
            raise UserError(f"{name}: row {row} is {max(depths)} nodes deep, expected at most {count}, `count`")
