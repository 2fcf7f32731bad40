"""Imports features computed by another program into a store for `finetune.py --offline-data`, with checks.

n tokens of a sample, H hidden, C = captures * H.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.base.schedule import run_base
from megatron_spec.build import Loaded, load_checkpoint
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.commands.checks import check_base_shapes, check_seq_length
from megatron_spec.commands.features import check_room, teacher_fingerprint
from megatron_spec.commands.runs import ImportRun, takes
from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.data.chat import Sample
from megatron_spec.data.packing import build_batch
from megatron_spec.drafts.teacher import base_argmax
from megatron_spec.features.dumps import Dump, dump_files, read_dump
from megatron_spec.features.store import FeatureWriter, SampleFeatures, StoreManifest, missing_shards
from megatron_spec.runtime import distributed
from megatron_spec.runtime.files import sha256_of

log = logging.getLogger(__name__)

NEAR = 0.06
"""Maximum relative difference (median over rows) that counts as equal: in bf16 two programs differ by 1 to 3 %, outputs
of adjacent layers by more."""


class _Importer:
    """Dumps of one folder for one base."""

    def __init__(self, loaded: Loaded, files: list[Path], final_norm: str, seq_length: int) -> None:
        self.loaded, self.files, self.final_norm, self.seq_length = loaded, files, final_norm, seq_length
        self.cut = self.unmasked = 0

    def read(self, path: Path) -> Dump:
        """A checked dump."""
        base = self.loaded.spec.base.config
        return read_dump(path, base.hidden_size, self.loaded.spec.draft.capture_layer_ids, base.vocab_size)

    @torch.no_grad()
    def normed(self, state_NH: Tensor) -> Tensor:
        """The state after the base's final norm."""
        base = self.loaded.base
        state = state_NH.to(base.world.device, base.dtype)
        return state if self.final_norm == "applied" else base.normed(state)

    @torch.no_grad()
    def sample(self, path: Path) -> SampleFeatures:
        """A dump in the form of the store, truncated to its length."""
        dump, base = self.read(path), self.loaded.base
        self.cut += len(dump.tokens) > self.seq_length
        self.unmasked += not dump.masked
        tokens, turns, captures, state = (
            x[: self.seq_length] for x in (dump.tokens, dump.turns, dump.captures, dump.state)
        )
        state = self.normed(state)
        return SampleFeatures(tokens, turns, captures, state, base_argmax(base, state, base.world.tp))

    def check(self, path: Path) -> None:
        """Run the base over one sample. Raises UserError if its features differ from the dump's."""
        dump, base, H = self.read(path), self.loaded.base, self.loaded.spec.base.config.hidden_size
        tokens, turns = dump.tokens[: self.seq_length], dump.turns[: self.seq_length]
        batch = build_batch([[Sample(tokens, turns, str(path))]], len(tokens), base.world.device)
        captures_SBC, state_SBH = run_base(base, [batch])[0]
        wrong = []
        for i, layer in enumerate(self.loaded.spec.draft.capture_layer_ids):
            part = slice(i * H, (i + 1) * H)
            away = distance(dump.captures[: self.seq_length, part], captures_SBC[:, 0, part])
            wrong += [f"the output of layer {layer} by {away:.2f}"] if away > NEAR else []
        away = distance(self.normed(dump.state[: self.seq_length]), state_SBH[:, 0])
        wrong += [f"the last state by {away:.2f}"] if away > NEAR else []
        if wrong:
            raise UserError(
                f"{path}: this base computes different features for these tokens: {', '.join(wrong)} (relative "
                f"difference, median over rows; up to {NEAR} is rounding). Check the base, the layers (counted from 0, "
                "without the embedding), --final-norm (whether hidden_states is after the base's final norm), and that "
                "captures are before any norm"
            )
        log.info("%s: the base reproduces the features", path)


def _identity(files: list[Path], run: ImportRun) -> str:
    """Identity of the dumps (names, sizes, content of the first) and of how they are read."""
    names = [[str(path.relative_to(run.dumps)), path.stat().st_size] for path in files]
    about = json.dumps([names, sha256_of(files[0]), run.final_norm])
    return hashlib.sha256(about.encode()).hexdigest()


def distance(found_NX: Tensor, expected_NX: Tensor) -> float:
    """Median over rows of |found - expected| / |expected|."""
    expected = expected_NX.float().cpu()
    rows_N = (found_NX.float().cpu() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)
    return float(rows_N.median())


@takes(ImportRun)
def import_features(run: ImportRun) -> Path:
    """Write the dumps below a folder as a feature store; resumable. One process.

    Raises UserError, naming the file, for an invalid dump.
    """
    files = dump_files(run.dumps)
    folder = resolve(run.load)
    spec = read_spec(folder)
    check_seq_length(run.seq_length, spec.base.config)
    base, captures = spec.base.config, spec.draft.capture_layer_ids
    check_base_shapes(run, base)
    if not captures:
        raise UserError(
            f"{run.load}: a {spec.draft.algorithm} draft reads no captured layers: extract its features instead"
        )
    if run.final_norm == "missing" and not run.check:
        raise UserError("--final-norm missing needs the base's norm, --check-samples 0 loads none of its layers")
    first = read_dump(files[0], base.hidden_size, captures, base.vocab_size)
    world = distributed.initialize(ParallelConfig())
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if run.bf16 else torch.float32,
        "base_path": run.base,
        "spec": spec,
    }
    loaded = load_checkpoint(folder, world, original_base=True, ends_only=not run.check, **options)
    manifest = StoreManifest(
        base_fingerprint=teacher_fingerprint(loaded),
        capture_layer_ids=captures,
        hidden_size=base.hidden_size,
        dtype=run.features_dtype or str(first.state.dtype).removeprefix("torch."),
        template_hash="",
        num_samples=len(files),
        seq_length=run.seq_length,
        data_hash=_identity(files, run),
    )
    importer = _Importer(loaded, files, run.final_norm, run.seq_length)
    for path in files[: run.check]:
        importer.check(path)
    _write(importer, Path(run.output_dir), manifest, first.state.dtype)
    return Path(run.output_dir)


def _write(importer: _Importer, folder: Path, manifest: StoreManifest, read_dtype: torch.dtype) -> None:
    pending = missing_shards(folder, manifest)
    numbers = [i for shard in pending for i in manifest.samples_of(shard)]
    size = sum(importer.files[i].stat().st_size for i in numbers)
    check_room(folder, size * manifest.torch_dtype.itemsize // read_dtype.itemsize, len(numbers))
    writer = FeatureWriter(folder, manifest)
    for done, shard in enumerate(pending):
        writer.write(shard, [importer.sample(importer.files[i]) for i in manifest.samples_of(shard)])
        log.info("features: shard %d of %d", done + 1, len(pending))
    if importer.cut:
        log.warning(
            "%d samples were longer than --seq-length and truncated to %d tokens", importer.cut, manifest.seq_length
        )
    if importer.unmasked:
        log.warning("%d samples have no loss_mask: all of their tokens are supervised", importer.unmasked)
    log.info("features: %d samples imported, the store is complete", len(numbers))
