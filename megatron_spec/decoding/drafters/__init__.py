"""One file per way of drafting; `build_drafter` finds the one for a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_spec.config import UserError
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation

if TYPE_CHECKING:
    from megatron_spec.pipeline.model import FrozenBase

__all__ = ["Context", "Drafter", "Observation", "build_drafter"]


def build_drafter(draft: Any, base: FrozenBase) -> Drafter | None:
    """A Drafter as it is, a draft model wrapped in its drafter, None for None.

    Raises UserError for a draft nothing here can decode with.
    """
    if draft is None or hasattr(draft, "prepare_draft_tokens"):
        return draft
    from megatron_spec.decoding.drafters.eagle import EagleDrafter
    from megatron_spec.decoding.drafters.medusa import MedusaDrafter
    from megatron_spec.drafts.medusa import MedusaDraft
    from megatron_spec.drafts.recurrent import RecurrentDraft

    if isinstance(draft, RecurrentDraft):
        return EagleDrafter(draft, base)
    if isinstance(draft, MedusaDraft):
        return MedusaDrafter(draft, base)
    raise UserError(f"decoding: found a draft of type {type(draft).__name__}, expected a draft of drafts/ or a Drafter")
