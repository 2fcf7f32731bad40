"""Draft models. `build_draft` is the one way from a configuration to a module on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_spec.config import EagleConfig, UserError

if TYPE_CHECKING:
    import torch

    from megatron_spec.distributed import World
    from megatron_spec.drafts.eagle import EagleDraft
    from megatron_spec.drafts.vocab import DraftVocab

ALGORITHMS = ("eagle3",)


def build_draft(config: EagleConfig, vocab: DraftVocab, world: World, dtype: torch.dtype) -> EagleDraft:
    """The draft of `config.algorithm` on this rank; parameters are NaN until initialised or loaded.

    Raises UserError for an algorithm that cannot be built, or sizes that do not fit the parallel layout.
    """
    from megatron_spec.drafts.eagle import EagleDraft

    if config.algorithm not in ALGORITHMS:
        raise UserError(f"algorithm {config.algorithm!r} is not supported yet: use one of {', '.join(ALGORITHMS)}")
    return EagleDraft(config, vocab, world.tp, world.parallel.sequence_parallel, dtype, world.device)
