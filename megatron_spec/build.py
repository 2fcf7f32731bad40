"""Configuration -> model on this rank: base, draft and vocabulary of a checkpoint, ready to train, decode or export."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_spec.base import te
from megatron_spec.base.model import FrozenBase
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import BaseReference
from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec, locked, read_spec
from megatron_spec.config import (
    LOCAL,
    BaseLayers,
    Fp8Recipe,
    ObjectiveConfig,
    OptimizerImpl,
    ParallelConfig,
    TransformerImpl,
    UserError,
    expect,
    expect_choice,
    require,
)
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.export.load import inspect_exported_base, load_exported_base, load_exported_ends
from megatron_spec.planning.draft_modules import check_draft_modules
from megatron_spec.planning.layouts import check_draft_parallel
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import attach_quantizers, load_base_amax
from megatron_spec.runtime import platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_json

log = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A checkpoint on this rank."""

    folder: Path
    spec: CheckpointSpec
    base_ref: BaseReference
    base: FrozenBase
    """`EndsOnly` if only embedding and LM head were requested."""
    draft: Draft
    vocab: DraftVocab
    base_amax: dict[str, float] | None
    """Ranges of a fake-quantised base."""
    base_quantised: bool
    """True if the base is fake-quantised with these ranges now."""
    extra: dict[str, Any]
    """Saved beside the tensors: iteration, samples consumed, objective."""


def link(ref: BaseReference) -> BaseLink:
    """The entry for a base in spec.json."""
    return BaseLink(path=str(ref.path), kind=ref.kind, fingerprint=ref.fingerprint, config=ref.config)


def check_base(spec: CheckpointSpec, base_path: str | None) -> BaseReference:
    """Find the base of a checkpoint and check that it is the one the draft was made for.

    Raises UserError if it is missing or its contents differ.
    """
    path = Path(base_path or spec.base.path)
    if not path.exists():
        raise UserError(f"the base of this checkpoint is not at {path}: give its new location with --base")
    ref = inspect_exported_base(path)
    if ref.fingerprint != spec.base.fingerprint:
        went_on = ""
        if ref.kind == "megatron":
            went_on = (
                "; if it was trained on since, give the iteration of the conversion with --base FOLDER/iter_NNNNNNN"
            )
        raise UserError(
            f"{path} is not the base this draft was made for: found fingerprint {ref.fingerprint[:16]}, "
            f"the checkpoint expects {spec.base.fingerprint[:16]}{went_on}"
        )
    return ref


def resolve_paths(
    spec: CheckpointSpec, parallel: ParallelConfig, dtype: torch.dtype, *, original_base: bool = False,
    layers: BaseLayers = LOCAL, ends_only: bool = False, objective: ObjectiveConfig | None = None, rows: int = 0,
    wanted: tuple[str, ...] = (), plain: bool = False, draft_impl: TransformerImpl = "local",
    draft_fp8_recipe: Fp8Recipe | None = None, optimizer_impl: OptimizerImpl = "auto",
) -> Paths:  # fmt: skip
    """The fast paths of base and draft of a checkpoint on this machine; the only place that resolves them.

    Transformer Engine's fp8 is one of them, requested by `layers`.

    Args:
        rows: rows of a micro-batch; 0: unknown.
        wanted: requested opt-in paths.
        plain: no fast paths.
        draft_impl, draft_fp8_recipe: modules of the draft, and Transformer Engine's recipe in training.
        optimizer_impl: whose optimizer was asked for.

    Raises UserError if a requested path, the base's layers, the draft's modules or the recipe cannot run, or the draft
    does not fit the tensor parallel size.
    """
    te.check(layers, platform.machine())
    check_draft_parallel(spec.draft, parallel)
    wanted += ("te_fp8",) if layers.recipe else ()
    quant = spec.quant.without_base if spec.quant is not None and original_base else spec.quant
    name = str(dtype).removeprefix("torch.")
    base = None if ends_only else spec.base.config
    setting = Setting(
        platform.machine(), name, parallel, base, spec.draft, objective, quant, layers, rows, wanted, plain=plain,
        draft_transformer_engine=draft_impl == "transformer_engine", draft_fp8_recipe=draft_fp8_recipe,
        optimizer_impl=optimizer_impl,
    )  # fmt: skip
    check_draft_modules(setting)
    paths = Paths(setting)
    paths.check()
    return paths


def load_checkpoint(
    path: str | Path, world: World, *, dtype: torch.dtype = torch.float32, base_path: str | None = None,
    original_base: bool = False, layers: BaseLayers = LOCAL, ends_only: bool = False,
    paths: Paths | None = None, plain: bool = False, spec: CheckpointSpec | None = None,
    draft_impl: TransformerImpl = "local", draft_fp8_recipe: Fp8Recipe | None = None,
    draft_class: type[Draft] | None = None,
) -> Loaded:  # fmt: skip
    """Base and draft of a checkpoint folder, fake-quantised if the checkpoint is.

    Args:
        spec: spec.json of the folder, if already read; its draft may differ in settings without tensors (RoPE).
        original_base: keep the base in high precision even if the checkpoint quantises it.
        layers: what the base's layers are built from.
        ends_only: load only the base's embedding and LM head, as features come from disk.
        paths: the fast paths of the run (`resolve_paths`), which also know the draft's modules; default: all that run
            here.
        plain, draft_impl, draft_fp8_recipe: see `resolve_paths`; used without `paths`.
        draft_class: class of the draft, if it is not this package's.

    Raises UserError for a missing, incomplete or mismatched checkpoint, before any weight of the base is read.
    """
    expect(dtype, torch.dtype, "dtype", "torch.float32, torch.bfloat16")
    require(dtype.is_floating_point, f"dtype: found {dtype}, expected a floating point type")
    expect(layers, BaseLayers, "layers")
    expect_choice(draft_impl, TransformerImpl, "draft_transformer_impl")
    with locked(path) as folder:
        _check_same_on_all_ranks(folder)
        spec = read_spec(folder) if spec is None else spec
        if spec.draft_class is not None and draft_class is None:
            raise UserError(
                f"{path} has a draft of a class of yours, {spec.draft_class}, which this package cannot build: load it "
                "with megatron_spec.load(folder, draft_class=...) in a program that has the class"
            )
        if paths is None:
            paths = resolve_paths(
                spec, world.parallel, dtype, original_base=original_base, layers=layers, ends_only=ends_only,
                plain=plain, draft_impl=draft_impl, draft_fp8_recipe=draft_fp8_recipe,
            )  # fmt: skip
        return _load(folder, spec, world, dtype, base_path, original_base, layers, ends_only, paths, draft_class)


def _check_same_on_all_ranks(folder: Path) -> None:
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, folder.name)
    if len(set(names)) > 1:
        raise UserError(
            f"ranks found different iterations in {folder.parent} ({names}): it was just saved; start again"
        )


def _load(
    folder: Path, spec: CheckpointSpec, world: World, dtype: torch.dtype, base_path: str | None, original_base: bool,
    layers: BaseLayers, ends_only: bool, paths: Paths, draft_class: type[Draft] | None,
) -> Loaded:  # fmt: skip
    ref = check_base(spec, base_path)
    vocab = DraftVocab.load(folder / "vocab.safetensors")
    draft = build_draft(spec.draft, vocab, world, dtype, paths, draft_class)
    base_amax = None
    if spec.quant is not None:
        attach_quantizers(draft, spec.quant, role="draft")
        amax_file = folder / "base_amax.json"
        base_amax = read_json(amax_file) if amax_file.is_file() else None
    extra = sharded.load(folder, draft, world)
    base: Any
    if ends_only:
        base = load_exported_ends(ref, world, dtype)
    else:
        base = load_exported_base(ref, world, spec.draft.capture_layer_ids, dtype, layers, paths)
    quantised = spec.quant is not None and spec.quant.base != "none"
    if quantised:
        if base_amax is None:
            raise UserError(
                f"checkpoint {folder} is quantised but its base_amax.json is missing: run quantize.py again"
            )
        if not original_base and not ends_only:
            assert spec.quant is not None
            attach_quantizers(base, spec.quant, role="base")
            load_base_amax(base, base_amax)
    return Loaded(folder, spec, ref, base, draft, vocab, base_amax, quantised and not original_base, extra)


def respec(spec: CheckpointSpec, **changes: object) -> CheckpointSpec:
    """A copy of a spec with changes."""
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
