"""One file per drafter; `build_drafter` selects the one for a draft model and a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal
from megatron_spec.decoding.options import check_confidence, check_lengths, check_options, decoding_type, read_choices

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase

__all__ = ["Context", "Drafter", "Observation", "Proposal", "build_drafter"]


def build_drafter(draft: Any, base: FrozenBase, config: DecodeConfig | None = None) -> Drafter | None:
    """The drafter for a draft model, a second base model (DraftTarget) or None; a Drafter is returned unchanged.

    Returns None, decoding with the base alone, for no draft and no decoding_type. Raises UserError for a draft that
    does not match the configuration.
    """
    config = config or DecodeConfig()
    if isinstance(draft, Drafter) or (draft is None and config.decoding_type is None):
        return draft
    from megatron_spec.drafts.dflash import DFlashDraft
    from megatron_spec.drafts.medusa import MedusaDraft
    from megatron_spec.drafts.recurrent import RecurrentDraft

    if isinstance(draft, (RecurrentDraft, MedusaDraft, DFlashDraft)):
        kind = decoding_type(draft.config.algorithm, config.decoding_type)
        if kind == config.decoding_type or config.decoding_type is None:
            check_options(config, kind)
            return _of_draft(draft, base, config)
    return _without_draft(draft, base, config)


def _of_draft(draft: Any, base: FrozenBase, config: DecodeConfig) -> Drafter:
    from megatron_spec.decoding.drafters.block import BlockDrafter, DSparkDrafter
    from megatron_spec.decoding.drafters.eagle import EagleDrafter, EagleTreeDrafter
    from megatron_spec.decoding.drafters.medusa import MedusaChoicesDrafter, MedusaDrafter, MedusaTreeDrafter
    from megatron_spec.decoding.drafters.peagle import PEagleDrafter
    from megatron_spec.drafts.dflash import DFlashDraft
    from megatron_spec.drafts.dspark import DSparkDraft
    from megatron_spec.drafts.medusa import MedusaDraft
    from megatron_spec.drafts.peagle import PEagleDraft

    check_confidence(config, draft.config)
    check_lengths(config, (config.max_draft_len,), draft.config)
    if isinstance(draft, DSparkDraft):
        return DSparkDrafter(draft, base, config.max_draft_len, config.confidence_threshold)
    if isinstance(draft, DFlashDraft):
        return BlockDrafter(draft, base, config.max_draft_len)
    if isinstance(draft, PEagleDraft):
        return PEagleDrafter(draft, base, config.max_draft_len)
    width, total = config.dynamic_tree_max_topK, config.max_total_draft_tokens
    if not isinstance(draft, MedusaDraft):
        if config.use_dynamic_tree:
            return EagleTreeDrafter(draft, base, config.max_draft_len, width, total)
        return EagleDrafter(draft, base)
    if config.use_dynamic_tree:
        return MedusaTreeDrafter(draft, base, width, total)
    if config.medusa_choices is not None:
        return MedusaChoicesDrafter(draft, base, read_choices(config.medusa_choices))
    return MedusaDrafter(draft, base)


def _without_draft(draft: Any, base: FrozenBase, config: DecodeConfig) -> Drafter:
    kind = config.decoding_type
    if kind in ("NGram", "SA", "User"):
        check_options(config, kind)
    if kind == "SA":
        from megatron_spec.decoding.drafters.lookup import LookupDrafter

        return LookupDrafter(config.max_matching_ngram_size or -1)
    if kind == "NGram":
        from megatron_spec.decoding.drafters.ngram import NGramDrafter

        return NGramDrafter(
            config.max_matching_ngram_size or 2, config.is_keep_all, config.is_use_oldest, config.is_public_pool
        )
    if kind == "User":
        from megatron_spec.decoding.drafters.user import user_drafter

        assert config.drafter is not None
        return user_drafter(config.drafter, base, config)
    from megatron_spec.base.model import FrozenBase

    if kind in (None, "DraftTarget") and isinstance(draft, FrozenBase):
        from megatron_spec.decoding.drafters.draft_target import DraftTargetDrafter

        return DraftTargetDrafter(draft, base)
    raise UserError(
        f"decoding: found a draft of type {type(draft).__name__} for decoding type {kind}, expected a draft "
        "of drafts/, a FrozenBase or a Drafter"
    )
