"""Features on disk: computed once, read in every epoch. To the draft, they are the same as those of `online`.

S sequence, B micro-batch, H hidden, C = captures * H, n tokens of one sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base
from megatron_spec.batch import Batch, Features
from megatron_spec.config import UserError
from megatron_spec.data.loader import Dataset
from megatron_spec.data.packing import build_batch
from megatron_spec.drafts.teacher import base_argmax
from megatron_spec.features.base import check_count
from megatron_spec.features.store import FeatureStore, FeatureWriter, SampleFeatures, StoreManifest
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.platform import CopyStream, to_device

log = logging.getLogger(__name__)

PIPELINED = 4
"""Micro-batches that run through the pipeline before results are written: fills the pipeline, and bounds memory."""


class OfflineFeatures:
    """A BackgroundSource that reads a store, which needs no communication. The base does not run."""

    def __init__(self, store: FeatureStore, world: World, dtype: torch.dtype = torch.float32) -> None:
        self.store, self.world, self.dtype = store, world, dtype
        self.copies = CopyStream(world.device)

    def features(self, batches: list[Batch], following: Sequence[Batch] = ()) -> list[Features]:
        """See `FeatureSource.features`. Raises UserError if a row differs from the stored sample of its index."""
        return self.start(batches)()

    def start(self, batches: list[Batch]) -> Callable[[], list[Features]]:
        """Read the features and start copying them to the device, beside its computation.

        Returns a function that gives them to the current stream, which then waits for the copies.
        """
        check_count(len(batches), self.world.pp_size)
        mine = batches[self.world.pp_rank :: self.world.pp_size]
        on_host = [batch.host or batch.to("cpu") for batch in mine]  # on the stream that made them
        with self.copies.copying():
            found = [self._read(*both) for both in zip(mine, on_host, strict=True)]
        copied = [x for f in found for x in (f.captures_SBC, f.state_SBH, f.argmax_SB) if x is not None]
        wait = self.copies.arrival(*copied)

        def arrived() -> list[Features]:
            """The features, for the current stream."""
            wait()
            return found

        return arrived

    def _read(self, batch: Batch, on_host: Batch) -> Features:
        assert batch.sample_ids is not None, "features on disk are found by the numbers of samples"
        B, S = batch.tokens_BS.shape
        manifest = self.store.manifest
        H = manifest.hidden_size
        where: dict[str, Any] = {"dtype": manifest.read_dtype, "pin_memory": self.world.device.type == "cuda"}
        captures_SBC = torch.empty(S, B, len(manifest.capture_layer_ids) * H, **where)
        state_SBH = torch.empty(S, B, H, **where)
        argmax_SB = torch.zeros(S, B, dtype=torch.int64)
        tokens_BS, lengths = on_host.tokens_BS, (on_host.documents_BS >= 0).sum(1).tolist()
        for row, samples in enumerate(batch.sample_ids):
            end = 0
            for document, index in enumerate(samples):
                sample, begin = self.store.features_of(index), end
                end += len(sample.tokens)
                last = document == len(samples) - 1
                ends_there = end == lengths[row] if last else end < lengths[row]
                if not ends_there or not torch.equal(sample.tokens, tokens_BS[row, begin:end]):
                    raise UserError(
                        f"sample {index} of the data differs from the one in {self.store.folder}: the features were "
                        "extracted with other conversations, template or seq_length; extract them again"
                    )
                captures_SBC[begin:end, row], state_SBH[begin:end, row] = sample.captures, sample.state
                argmax_SB[begin:end, row] = sample.argmax
            captures_SBC[end:, row], state_SBH[end:, row] = 0, 0
        argmax_SB = to_device(argmax_SB, self.world.device)
        if batch.context is not None:
            captures_SBC, state_SBH = batch.context.part(captures_SBC, 0), batch.context.part(state_SBH, 0)
        return Features(batch, self._place(captures_SBC), self._place(state_SBH), argmax_SB)

    def _place(self, x_SBX: Tensor) -> Tensor:
        """This rank's rows, on its device."""
        if self.world.parallel.sequence_parallel:
            x_SBX = x_SBX.chunk(self.world.tp_size)[self.world.tp_rank]
        return to_device(x_SBX.contiguous(), self.world.device).to(self.dtype)


def extract(
    base: FrozenBase, dataset: Dataset, folder: str | Path, manifest: StoreManifest, micro_batch_size: int = 1,
    part: tuple[int, int] = (0, 1),
) -> int:  # fmt: skip
    """Compute the features of every sample of `dataset` and write them to `folder`. Collective.

    Data parallel ranks share the shards round-robin. A run that was interrupted continues with the missing shards.

    Args:
        part: (i, n): only shards i, i + n, ..., so that n concurrent runs can share a folder.

    Returns:
        The number of shards written by all ranks together.

    Raises:
        UserError: the folder was started with other settings.
    """
    world = base.world
    todo = [shard for shard in _agree_on_pending(folder, manifest, world) if shard % part[1] == part[0]]
    writer = FeatureWriter(folder, manifest)
    mine = todo[world.dp_rank :: world.dp_size]
    for done, shard in enumerate(mine):
        samples = _run_shard(base, dataset, manifest.samples_of(shard), micro_batch_size)
        if world.is_last_stage and world.tp_rank == 0 and (world.context is None or world.context.group.rank() == 0):
            writer.write(shard, samples)
        log.info("features: shard %d of %d on data rank %d", done + 1, len(mine), world.dp_rank)
    dist.barrier()
    return len(todo)


def _agree_on_pending(folder: str | Path, manifest: StoreManifest, world: World) -> list[int]:
    """Missing shards as seen by rank 0 before any rank writes, broadcast; its UserError is raised on all ranks."""
    answer: list[list[int] | str] = [[]]
    if world.rank == 0:
        try:
            answer = [FeatureWriter(folder, manifest).pending()]
        except UserError as e:
            answer = [str(e)]
    dist.broadcast_object_list(answer, src=0, device=world.device)
    if isinstance(answer[0], str):
        raise UserError(answer[0])
    return answer[0]


def _run_shard(base: FrozenBase, dataset: Dataset, numbers: range, micro_batch_size: int) -> list[SampleFeatures]:
    """Features of the samples in order, on the last stage ([] elsewhere); samples are batched by length."""
    world = base.world
    order = sorted(numbers, key=lambda i: len(dataset[i]))
    chunks = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    group = PIPELINED * world.pp_size
    found: dict[int, SampleFeatures] = {}
    for start in range(0, len(chunks), group):
        found.update(_run_chunks(base, dataset, chunks[start : start + group]))
    return [found[i] for i in numbers] if found else []


def _run_chunks(base: FrozenBase, dataset: Dataset, chunks: list[list[int]]) -> dict[int, SampleFeatures]:
    """Features of the samples of several micro-batches, by index, on the last stage ({} elsewhere)."""
    world, batches = base.world, []
    for chunk in chunks:  # they run through the pipeline together, each with its own length
        length = -(-max(len(dataset[i]) for i in chunk) // world.sequence_multiple) * world.sequence_multiple
        batches.append(build_batch([[dataset[i]] for i in chunk], length, world.device, context=world.context))
    found: dict[int, SampleFeatures] = {}
    for chunk, (captures_SBC, state_SBH) in zip(chunks, run_base(base, batches), strict=False):
        whole = [_whole(world, captures_SBC), _whole(world, state_SBH)]
        argmax_SB = base_argmax(base, whole[1].flatten(0, 1), world.tp).view(whole[1].shape[:2])
        whole.append(argmax_SB)
        for row, i in enumerate(chunk):
            # Copied, as a view would keep the padded batch alive.
            own = (x[: len(dataset[i]), row].to("cpu", copy=True) for x in whole)
            found[i] = SampleFeatures(dataset[i].tokens, dataset[i].turns, *own)
    return found


def _whole(world: World, x_SBX: Tensor) -> Tensor:
    if world.parallel.sequence_parallel:
        x_SBX = gather_from_sequence_parallel_region(x_SBX.contiguous(), group=world.tp)
    return x_SBX if world.context is None else world.context.gather(x_SBX)
