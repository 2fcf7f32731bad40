"""Features of the base on disk: extracted by a script, or by the first finetune run with --feature-cache."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.base.placement import check_parallel
from megatron_spec.build import Loaded, load_checkpoint
from megatron_spec.checkpoint.spec import identity, locked, read_spec
from megatron_spec.commands.checks import check_base_shapes, check_seq_length
from megatron_spec.commands.data import open_dataset, tokenizer_folder
from megatron_spec.commands.runs import ExtractRun, settings_of, takes
from megatron_spec.data.loader import ConversationDataset, Dataset, lengths_of
from megatron_spec.features.offline import OfflineFeatures, extract
from megatron_spec.features.store import FeatureStore, StoreManifest, missing_shards
from megatron_spec.planning import layouts
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import human_size, require_space
from megatron_spec.runtime.folders import require_writable
from megatron_spec.runtime.hub import model_folder

log = logging.getLogger(__name__)


def teacher_fingerprint(loaded: Loaded) -> str:
    """Identity of the base's function: its weights and, if fake-quantised, its ranges."""
    if loaded.base_amax is None or not loaded.base_quantised:
        return loaded.base_ref.fingerprint
    ranges = json.dumps(loaded.base_amax, sort_keys=True).encode()
    return f"{loaded.base_ref.fingerprint}+{hashlib.sha256(ranges).hexdigest()[:16]}"


def template_hash(tokenizer_folder: str, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Identity of tokenizer, chat template and template arguments."""
    digest, folder = hashlib.sha256(), model_folder(tokenizer_folder, weights=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    if template_kwargs:
        digest.update(json.dumps(dict(template_kwargs), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def manifest_of(loaded: Loaded, dataset: ConversationDataset, template: str, dtype: str | None = None) -> StoreManifest:
    """Manifest of a store of `dataset`'s features.

    Args:
        template: `template_hash`.
    """
    computed = str(loaded.base.dtype).removeprefix("torch.")
    return StoreManifest(
        base_fingerprint=teacher_fingerprint(loaded),
        capture_layer_ids=loaded.spec.draft.capture_layer_ids,
        hidden_size=loaded.spec.base.config.hidden_size,
        dtype=dtype or computed,
        template_hash=template,
        num_samples=len(dataset),
        seq_length=dataset.seq_length,
        data_hash=dataset.store.meta["data"],
        computed=computed,
    )


def check_disk(folder: str, manifest: StoreManifest, dataset: Dataset, part: tuple[int, int] = (0, 1)) -> None:
    """Log the size of a store's missing shards, and raise UserError if the disk is too small for them."""
    shards = [shard for shard in missing_shards(Path(folder), manifest) if shard % part[1] == part[0]]
    pending = [i for shard in shards for i in manifest.samples_of(shard)]
    need = int(lengths_of(dataset)[pending].sum(dtype="int64")) * manifest.bytes_per_token
    check_room(folder, need, len(pending))


def check_room(folder: str | Path, need: int, samples: int) -> None:
    """Log the size of features to write, and raise UserError if the disk is too small for them."""
    log.info("features of %d samples to write: %s in %s", samples, human_size(need), folder)
    require_space(folder, need, "make room, give another folder or use fewer conversations")


def cached_features(
    folder: str, loaded: Loaded, dataset: ConversationDataset, template: str, world: World, micro_batch_size: int
) -> OfflineFeatures:
    """Features of `dataset` from `folder`; missing ones are computed. Collective.

    Raises UserError if the folder has features of another base or other data.
    """
    manifest = manifest_of(loaded, dataset, template)
    check_disk(folder, manifest, dataset)
    written = extract(loaded.base, dataset, folder, manifest, micro_batch_size)
    log.info("features: %d shards computed, the others already existed", written)
    return OfflineFeatures(FeatureStore(folder, manifest.to_dict()), world, loaded.base.dtype)


@takes(ExtractRun)
def extract_features(run: ExtractRun) -> Path:
    """Run the base of a checkpoint over conversations and write features for training. Resumable.

    Raises UserError for invalid input, if possible before any weight is read.
    """
    with locked(run.load) as folder:
        return _extract(run, folder)


def _extract(run: ExtractRun, folder: Path) -> Path:
    spec = read_spec(folder)
    check_base_shapes(run, spec.base.config)
    layouts.check("extract", run.parallel, spec.base.config.num_experts)
    check_parallel(spec.base.config, run.parallel)
    require_writable(run.output_dir)
    te.check(run.layers, platform.machine())
    check_seq_length(run.seq_length, spec.base.config)
    world = distributed.initialize(run.parallel, settings=settings_of(run, load=identity(folder)))
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    texts, kwargs = tokenizer_folder(spec, run.base, run.tokenizer), run.chat_template_kwargs
    known = spec.base.config.vocab_size
    dataset = open_dataset(run.data, texts, run.seq_length, vocab_size=known, template_kwargs=kwargs)
    loaded = load_checkpoint(
        folder, world, dtype=dtype, base_path=run.base, layers=run.layers, plain=run.plain, spec=spec
    )
    manifest = manifest_of(loaded, dataset, template_hash(texts, kwargs), run.features_dtype)
    part = (run.part[0], run.part[1])
    check_disk(run.output_dir, manifest, dataset, part)
    begin = time.monotonic()
    written = extract(loaded.base, dataset, run.output_dir, manifest, run.micro_batch_size, part)
    missing = len(missing_shards(Path(run.output_dir), manifest))
    log.info(
        "features: %d shards computed in %.0f s; %s", written, time.monotonic() - begin,
        f"{missing} of {manifest.num_shards} are still missing" if missing else "the store is complete",
    )  # fmt: skip
    return Path(run.output_dir)


def stored_features(folder: str, loaded: Loaded, world: World) -> OfflineFeatures:
    """Features of a complete store for a draft.

    Raises UserError unless base, captures and width are those of the checkpoint.
    """
    expected = {
        "base_fingerprint": teacher_fingerprint(loaded),
        "capture_layer_ids": loaded.spec.draft.capture_layer_ids,
        "hidden_size": loaded.spec.base.config.hidden_size,
    }
    return OfflineFeatures(FeatureStore(folder, expected), world, loaded.base.dtype)
