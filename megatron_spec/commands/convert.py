"""Base checkpoint -> draft checkpoint: an initialised draft and a reference to its base."""

from __future__ import annotations

import logging
import typing
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.base.last_layer import last_layer_tensors
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.placement import check_parallel
from megatron_spec.build import link
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import BaseReference
from megatron_spec.checkpoint.native_mtp import check_own_module, load_own_module
from megatron_spec.checkpoint.spec import CheckpointSpec
from megatron_spec.commands.checks import check_base_shapes
from megatron_spec.commands.runs import ConvertRun, DraftRequest, settings_of, takes
from megatron_spec.config import BlockConfig, Config, DraftConfig, EagleConfig, MedusaConfig, UserError, expect, presets
from megatron_spec.config.modelopt import from_modelopt
from megatron_spec.data import mask_token
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export import native_mtp
from megatron_spec.export.formats import Reading
from megatron_spec.export.load import (
    StoredTensors,
    inspect_exported_base,
    load_draft,
    load_exported_base,
    open_draft,
)
from megatron_spec.export.served import check_exportable
from megatron_spec.planning import layouts
from megatron_spec.planning.paths import Paths
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_object
from megatron_spec.runtime.folders import require_empty

log = logging.getLogger(__name__)

MASKED = ("dflash", "dspark", "p-eagle")
"""Algorithms with a mask token in their input."""


def draft_vocabulary(path: str | None, overrides: dict[str, Any], vocab_size: int) -> DraftVocab:
    """The vocabulary of a new draft: the calibrated one in `path`, or the whole base vocabulary.

    Raises UserError for a reduced size without a calibrated vocabulary, and for conflicting sizes.
    """
    wanted = overrides.get("draft_vocab_size")
    if path is None:
        if wanted not in (None, vocab_size):
            raise UserError(
                f"draft_vocab_size is {wanted}, but no calibrated vocabulary was given: run "
                "tools/calibrate_draft_vocab.py on the training conversations and pass --draft-vocab"
            )
        return DraftVocab.full(vocab_size)
    file = Path(path)
    vocab = DraftVocab.load(file / "draft_vocab.safetensors" if file.is_dir() else file)
    if vocab.vocab_size != vocab_size:
        raise UserError(f"{path} was made for a vocabulary of {vocab.vocab_size} tokens, the base has {vocab_size}")
    if wanted not in (None, len(vocab)):
        raise UserError(f"draft_vocab_size is {wanted}, but {path} holds {len(vocab)} tokens")
    return vocab


def plan(ref: BaseReference, request: DraftRequest) -> tuple[DraftConfig, DraftVocab, Reading | None]:
    """(architecture, vocabulary, the published draft to start from, if any), checked before base weights are read."""
    if request.draft is not None:
        reading = published_draft(request.draft, ref)
        _check_algorithm(request, reading.config)
        return reading.config, StoredTensors(reading).vocab, reading
    return *_plan_new(ref, request), None


def _plan_new(ref: BaseReference, request: DraftRequest) -> tuple[DraftConfig, DraftVocab]:
    if request.mtp_from_base:
        return own_module(ref), DraftVocab.full(ref.config.vocab_size)
    if request.algorithm == "eagle":
        return _plan_eagle(ref, request.eagle_algorithm or "eagle3", request.eagle_config, request.draft_vocab)
    if request.algorithm == "medusa":
        names = {
            "num_heads": "num_medusa_heads",
            "num_layers": "num_medusa_layers",
            "share_base_head": "share_base_head",
        }
        overrides = {k: v for k, name in names.items() if (v := getattr(request, name)) is not None}
    else:
        overrides = read_object(request.draft_config, unique=True) if request.draft_config else {}
    vocab = draft_vocabulary(request.draft_vocab, overrides, ref.config.vocab_size)
    return fresh_config(ref, request.algorithm, overrides, vocab), vocab


def published_draft(folder: str | Path, ref: BaseReference) -> Reading:
    """A draft in a folder, to train further. Raises UserError if it is quantised, or a base's own prediction module."""
    reading = open_draft(folder, ref)
    if reading.config.of_base:
        raise UserError(
            f"--draft {folder}: this folder has a base's own prediction module: use --mtp-from-base instead "
            "(in the library, mtp_from_base=True)"
        )
    if reading.quantised():
        raise UserError(
            f"--draft {folder}: its linears are in fp8 or nvfp4: use the high-precision draft, and quantise it again "
            "with quantize.py after training"
        )
    return reading


def own_module(ref: BaseReference) -> EagleConfig:
    """Architecture of the base's own prediction module. Raises UserError if its files have none."""
    if ref.kind != "hf":
        raise UserError("--mtp-from-base reads Hugging Face folders, this base is a Megatron checkpoint")
    own = presets.own_mtp_config(ref.config)
    check_own_module(Path(ref.path), own, native_mtp.weight_shapes(own))
    return own


def _check_algorithm(request: DraftRequest, config: DraftConfig) -> None:
    """Raise UserError if --export-algorithm differs from the algorithm of --draft."""
    kind = "eagle" if isinstance(config, EagleConfig) else config.algorithm
    if request.sets("algorithm") and request.algorithm != kind:
        raise UserError(
            f"--export-algorithm {request.algorithm}, but the draft of --draft is {config.algorithm}: leave it out"
        )


def with_mask_token(ref: BaseReference, overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides, with the base's mask token, if it has one and they have none."""
    if overrides.get("mask_token_id") is not None or ref.kind != "hf":
        return overrides
    found = mask_token.find(Path(ref.path), ref.config.vocab_size)
    if found is None:
        return overrides
    log.info("mask token: %d", found)
    return {**overrides, "mask_token_id": found}


def _plan_eagle(
    ref: BaseReference, eagle_algorithm: str, eagle_config: str | None, draft_vocab: str | None
) -> tuple[EagleConfig, DraftVocab]:
    overrides = from_modelopt(read_object(eagle_config, unique=True) if eagle_config else {}, eagle_algorithm)
    vocab = draft_vocabulary(draft_vocab, overrides, ref.config.vocab_size)
    return _eagle_config(ref, eagle_algorithm, overrides, vocab), vocab


def _eagle_config(ref: BaseReference, algorithm: str, overrides: dict[str, Any], vocab: DraftVocab) -> EagleConfig:
    """Args: overrides: by this package's names (`from_modelopt`)."""
    if algorithm in MASKED:
        overrides = with_mask_token(ref, overrides)
    return presets.eagle_config(ref.config, algorithm, {"draft_vocab_size": len(vocab), **overrides})


def draft_kinds() -> dict[str, type[Any]]:
    """Name of a kind of draft -> its configuration class: every algorithm, and 'eagle' for EAGLE-3."""
    kinds = {"eagle": EagleConfig}
    for cls in typing.get_args(DraftConfig):
        kinds |= dict.fromkeys(typing.get_args(typing.get_type_hints(cls)["algorithm"]), cls)
    return kinds


def _check_kind(kind: str, algorithm: str) -> None:
    """Raise UserError for an algorithm that is not of this kind."""
    kinds = draft_kinds()
    if kinds.get(algorithm) is not kinds[kind] or kind not in ("eagle", algorithm):
        raise UserError(f"convert: a draft of kind {kind!r} cannot have the algorithm {algorithm!r}")


def check_source(draft: str | Path | None, mtp_from_base: bool, fresh: dict[str, bool]) -> None:
    """Raise UserError for two sources of a draft, and for arguments of new drafts (name -> was it given?)."""
    if draft is None and not mtp_from_base:
        return
    if draft is not None and not isinstance(draft, (str, Path)):
        raise UserError(f"convert: found {draft!r} for draft, expected a folder (a class of your own is draft_class)")
    if draft is not None and mtp_from_base:
        raise UserError("convert: draft= and mtp_from_base=True name two drafts: give one of them")
    given = [name for name, is_given in fresh.items() if is_given]
    if given:
        source = "mtp_from_base=True" if mtp_from_base else "draft="
        raise UserError(f"convert: {source} takes the draft as it is: leave {', '.join(given)} out")


def requested_config(drafts: Any, ref: BaseReference, vocab: DraftVocab) -> DraftConfig:
    """Architecture of a new draft from the library's list of one pair (kind, configuration or overrides).

    Raises UserError for another list, an unknown kind, or a configuration of another kind.
    """
    kinds = draft_kinds()
    given: list[Any] = list(drafts) if isinstance(drafts, (list, tuple)) else [drafts]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in given):
        raise UserError(f"convert: found drafts {drafts!r}, expected a list of one pair such as ('eagle3', {{}})")
    if len(given) != 1 or given[0][0] not in kinds:
        found, known = [name for name, _ in given], ", ".join(sorted(kinds))
        raise UserError(
            f"convert: found drafts {found}, expected exactly one, of kind {known} (a class of your own is draft_class)"
        )
    kind, config = given[0]
    if not isinstance(config, Config):
        return fresh_config(ref, kind, dict(config or {}), vocab)
    if not isinstance(config, kinds[kind]):
        raise UserError(f"convert: found a {type(config).__name__} for a draft of kind {kind!r}")
    complete = typing.cast(DraftConfig, config)
    _check_kind(kind, complete.algorithm)
    for name, expected in (("target_hidden_size", ref.config.hidden_size), ("vocab_size", ref.config.vocab_size)):
        if (found := getattr(complete, name)) != expected:
            raise UserError(f"convert: {name} of the draft is {found}, but the base has {expected}")
    return complete


def fresh_config(ref: BaseReference, kind: str, overrides: dict[str, Any], vocab: DraftVocab) -> DraftConfig:
    """Architecture of a new draft of a kind in `draft_kinds`: the preset for this base, with overrides.

    Raises UserError for overrides that this kind does not have, and for a reduced vocabulary if it needs the whole one.
    """
    overrides, cls = dict(overrides), draft_kinds()[kind]
    algorithm = overrides.pop("algorithm", "eagle3" if kind == "eagle" else kind)
    _check_kind(kind, algorithm)
    if cls is MedusaConfig and len(vocab) != vocab.vocab_size:
        raise UserError(f"convert: a draft of kind {kind!r} has the whole vocabulary of the base: leave vocab out")
    if cls is MedusaConfig:
        return presets.medusa_config(ref.config, **overrides)
    if cls is BlockConfig:
        overrides = {"draft_vocab_size": len(vocab), **with_mask_token(ref, overrides)}
        return presets.block_config(ref.config, algorithm, overrides)
    return _eagle_config(ref, algorithm, from_modelopt(overrides, algorithm), vocab)


def new_draft(
    base: FrozenBase, config: DraftConfig, vocab: DraftVocab, world: World, dtype: torch.dtype, seed: int,
    paths: Paths | None = None, draft_class: type[Draft] | None = None,
) -> Draft:  # fmt: skip
    """A draft initialised from the base; the values do not depend on the parallel layout.

    Raises UserError for parameters of a class of the user's that have no value.
    """
    expect(seed, int, "seed")
    draft: Draft = build_draft(config, vocab, world, dtype, paths, draft_class)
    draft.initialize(base, last_layer_tensors(base), seed)
    if unset := [name for name, p in draft.named_parameters() if bool(p.isnan().any())]:
        raise UserError(
            f"{type(draft).__name__}: {', '.join(unset[:8])} {'have' if len(unset) > 1 else 'has'} no initial value: "
            "set it in the constructor or in initialize"
        )
    return draft


def first_draft(
    base: FrozenBase, ref: BaseReference, config: DraftConfig, vocab: DraftVocab, world: World, dtype: torch.dtype,
    seed: int, published: Reading | None = None, paths: Paths | None = None,
    draft_class: type[Draft] | None = None,
) -> Draft:  # fmt: skip
    """The draft that training starts from, by `plan`: published, the base's own module, or new.

    Args:
        paths: fast paths and modules of the draft; default: all paths that run here, without Transformer Engine.
        draft_class: a class of the user's in place of the algorithm's.
    """
    if published is not None:
        return load_draft(published, world, dtype, paths, draft_class)
    if not config.of_base:
        return new_draft(base, config, vocab, world, dtype, seed, paths, draft_class)
    draft: Draft = build_draft(config, vocab, world, dtype, paths, draft_class)
    load_own_module(draft, Path(ref.path), world)
    return draft


@takes(ConvertRun)
def convert(run: ConvertRun) -> Path:
    """Make a draft for a base (Hugging Face folder or Megatron checkpoint) and save it. Returns the iteration folder.

    Raises UserError for unsupported bases, configurations and layouts, before any weight is read.
    """
    require_empty(run.save, "give another --save folder, or remove it to convert again")
    ref = inspect_exported_base(run.load)
    check_base_shapes(run, ref.config)
    config, vocab, published = plan(ref, run)
    layouts.check("convert", run.parallel)
    check_parallel(ref.config, run.parallel)
    te.check(run.layers, platform.machine())
    layouts.check_draft_parallel(config, run.parallel)
    for limit in check_exportable(config, ref.config):
        log.warning("%s", limit)
    world = distributed.initialize(run.parallel, run.seed, settings=settings_of(run, load=ref.fingerprint))
    with distributed.sole_run(run.save, world):
        return _convert(run, ref, config, vocab, published, world)


def _convert(
    run: ConvertRun, ref: BaseReference, config: DraftConfig, vocab: DraftVocab, published: Reading | None, world: World
) -> Path:
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    base = load_exported_base(ref, world, capture_layer_ids=config.capture_layer_ids, dtype=dtype, layers=run.layers)
    draft = first_draft(base, ref, config, vocab, world, dtype, run.seed, published)
    spec = CheckpointSpec(base=link(ref), draft=config)
    folder = sharded.save(run.save, spec, draft, vocab, world, run_config={"seed": run.seed, "bf16": run.bf16})
    parameters = sum(p.numel() for p in draft.parameters()) * 1e-6
    log.info("draft %s, %.1f M parameters on this rank, D = %d: %s", config.algorithm, parameters, len(vocab), folder)
    return folder
