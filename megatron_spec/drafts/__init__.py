"""Draft models. `build_draft` builds the module of a configuration on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_spec.config import DraftConfig

if TYPE_CHECKING:
    import torch

    from megatron_spec.drafts.contract import Draft
    from megatron_spec.drafts.vocab import DraftVocab
    from megatron_spec.planning.paths import Paths
    from megatron_spec.runtime.distributed import World

ALGORITHMS = ("eagle1", "eagle3", "eagle3.1", "p-eagle", "eagle-mtp", "medusa", "dflash", "dspark")


def shipped_class(algorithm: str) -> Any:
    """This package's class for an algorithm."""
    from megatron_spec.drafts.dflash import DFlashDraft
    from megatron_spec.drafts.dspark import DSparkDraft
    from megatron_spec.drafts.eagle1 import Eagle1Draft
    from megatron_spec.drafts.eagle3 import EagleDraft
    from megatron_spec.drafts.medusa import MedusaDraft
    from megatron_spec.drafts.mtp import MtpDraft
    from megatron_spec.drafts.peagle import PEagleDraft

    kinds = (Eagle1Draft, EagleDraft, EagleDraft, PEagleDraft, MtpDraft, MedusaDraft, DFlashDraft, DSparkDraft)
    return dict(zip(ALGORITHMS, kinds, strict=True))[algorithm]


def build_draft(
    config: DraftConfig, vocab: DraftVocab, world: World, dtype: torch.dtype, paths: Paths | None = None,
    draft_class: type[Draft] | None = None,
) -> Any:  # fmt: skip
    """The draft of `config.algorithm` on this rank; parameters are NaN until initialised or loaded.

    Args:
        paths: fast paths it may use; default: all that run here.
        draft_class: a class of the user's in place of the algorithm's (`drafts.contract.Draft`).

    Raises UserError for sizes that do not fit the parallel layout, and for a class that cannot be built so.
    """
    from megatron_spec.drafts.engine import TransformerEngine
    from megatron_spec.drafts.linear import Placement
    from megatron_spec.drafts.own import check_attributes, check_class
    from megatron_spec.planning.paths import Paths, Setting
    from megatron_spec.runtime.platform import machine

    kind = shipped_class(config.algorithm)
    if draft_class is not None:
        check_class(draft_class, config.algorithm)
    if paths is None:
        name = str(dtype).removeprefix("torch.")
        paths = Paths(Setting(machine(), name, world.parallel, draft=config))
    engine = TransformerEngine(paths.setting.draft_fp8_recipe) if paths.setting.draft_transformer_engine else None
    place = Placement(world.tp, world.parallel.sequence_parallel, dtype, world.device, engine)
    draft = (draft_class or kind)(config, vocab, place)
    check_attributes(draft)
    if getattr(draft, "has_own_steps", False):
        paths = paths.without("draft_fused", "draft_fp8")
        paths.check()
    draft.paths, draft.engine = paths, engine
    if type(draft) is kind:
        _check_structure(draft, world.tp_size, world.tp_rank)
    return draft


def _check_structure(draft: Any, ranks: int, rank: int) -> None:
    """Assert that the module has exactly the tensors of `config.structure`, from which everything else is derived."""
    from megatron_spec.config.structure import draft_tensors, share

    expected = {}
    for name, spec in draft_tensors(draft.config).items():
        parts = [len(share(size, ranks, rank)) if dim == spec.split else size for dim, size in enumerate(spec.shape)]
        expected[name] = (tuple(parts), spec.split)
    found = {}
    for name, p in draft.named_parameters():
        found[name] = (tuple(p.shape), p.partition_dim if getattr(p, "tensor_model_parallel", False) else None)
    wrong = {name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)}
    assert not wrong, f"config/structure.py and the modules differ in {sorted(wrong)[:8]}"
