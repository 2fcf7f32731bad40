"""Drafts of the user's: classes derived from this package's, or from `Draft` (docs/architecture.md)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from megatron_spec.config import DraftConfig, ObjectiveConfig, UserError, expect, presets
from megatron_spec.config.structure import draft_tensors
from megatron_spec.drafts import ALGORITHMS, shipped_class
from megatron_spec.drafts.contract import Draft


def own_class(draft: Any) -> str | None:
    """module:Class of a draft of a class outside this package; None for its own."""
    kind = type(draft)
    return None if kind is shipped_class(draft.config.algorithm) else f"{kind.__module__}:{kind.__qualname__}"


def check_class(found: Any, algorithm: str) -> None:
    """Raise UserError unless `found` is a kind of draft that fits the algorithm and is built like this package's."""
    if not isinstance(found, type) or not issubclass(found, Draft):
        raise UserError(
            f"draft_class: found {found!r}, expected a class derived from megatron_spec.drafts.contract.Draft"
        )
    known, shipped = {shipped_class(name) for name in ALGORITHMS}, shipped_class(algorithm)
    nearest = next((base for base in found.__mro__ if base in known), None)
    if nearest not in (None, shipped):
        raise UserError(
            f"draft_class: {found.__name__} is derived from {nearest.__name__}, expected {shipped.__name__} for a "
            f"draft of kind {algorithm!r}"
        )
    try:
        inspect.signature(found).bind(None, None, None)
    except TypeError:
        raise UserError(
            f"draft_class: found the constructor {found.__name__}{inspect.signature(found)}, expected (config, vocab, "
            "place)"
        ) from None


def check_attributes(draft: Draft) -> None:
    """Raise UserError for a draft without configuration or vocabulary."""
    missing = [name for name in ("config", "vocab") if not hasattr(draft, name)]
    if missing:
        raise UserError(
            f"found a {type(draft).__name__} without {' and '.join(missing)}, expected a draft with config (an "
            "EagleConfig, MedusaConfig or BlockConfig) and vocab (a DraftVocab): its constructor gets both"
        )


def check_tensors(draft: nn.Module, what: str) -> None:
    """Raise UserError if a draft has not exactly the tensors of its algorithm, as a class of the user's may."""
    config: DraftConfig = draft.config  # type: ignore[assignment]
    expected, found = draft_tensors(config).keys(), dict(draft.named_parameters()).keys()
    if expected != found:
        more, fewer = (", ".join(sorted(x)[:4]) or "none" for x in (found - expected, expected - found))
        raise UserError(
            f"{type(draft).__name__} cannot {what}: its tensors are not those of {config.algorithm} (more: {more}; "
            f"fewer: {fewer}), and no engine computes it; save it, and serve it with code of your own"
        )


def check_modules(draft: Draft) -> None:
    """Raise UserError for a draft of this package's class with modules from elsewhere: `load` would not build them."""
    known = ("megatron_spec.", "torch.nn.modules.")
    other = [name for name, m in draft.named_modules() if not type(m).__module__.startswith(known)]
    if own_class(draft) is None and other:
        raise UserError(
            f"save: {', '.join(other[:4])} of the draft {'are modules' if len(other) > 1 else 'is a module'} of yours, "
            f"which load would not build: make the change in the constructor of a class derived from "
            f"{type(draft).__name__}, and give it to convert and load as draft_class"
        )


def objective_of(draft: Draft, objective: Any) -> ObjectiveConfig:
    """The objective with the draft's defaults. Raises UserError if it does not fit the draft."""
    check_attributes(draft)
    expect(objective, ObjectiveConfig, "objective")
    complete, usual = (presets.objective_for(draft.config, x) for x in (objective, ObjectiveConfig()))
    if draft.row_loss is not None and complete.loss != usual.loss:
        raise UserError(
            f"objective: the loss is {complete.loss}, but {type(draft).__name__} has a row_loss of its own: leave the "
            "loss out"
        )
    return complete
