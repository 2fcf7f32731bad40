"""Samples in memory, and the order in which ranks read them.

The order is a pure function of (seed, samples consumed, data-parallel rank): nothing is stored to resume, and a run
continues with the same samples in another layout. All micro-batches of one global batch have one length, because the
stages of a pipeline agree on shapes beforehand.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_spec.batch import Batch
from megatron_spec.config import UserError
from megatron_spec.context import ContextShard
from megatron_spec.data.chat import ChatEncoder, Sample, read_conversations
from megatron_spec.data.packing import build_batch, pack

log = logging.getLogger(__name__)

__all__ = ["BatchLoader", "ConversationDataset", "Dataset", "Sample"]


class Dataset(Protocol):
    """What the loader reads: samples by index, none longer than `seq_length`."""

    seq_length: int

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`."""
        ...


def _longest_turn(sample: Sample) -> int:
    return int(torch.bincount(sample.turns.long())[1:].max()) if bool((sample.turns > 0).any()) else 0


class ConversationDataset:
    """The conversations of a JSON lines file, tokenised once, cut to `seq_length` tokens and kept in memory.

    A conversation of which the cut leaves no two supervised tokens in one turn (a draft is trained on pairs) is
    dropped with a warning.

    Attributes:
        dropped: reason -> number of conversations left out.
        statistics: figures of the mask, as logged.

    Raises UserError for what `read_conversations` and `ChatEncoder` refuse, and when nothing supervised is left.
    """

    def __init__(self, path: Path | str, tokenizer: Any, seq_length: int, stop_token_ids: Collection[int] = ()) -> None:
        if seq_length < 2:
            raise UserError(f"seq_length must be at least 2, found {seq_length}")
        self.path = Path(path)
        self.seq_length = seq_length
        self.dropped: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._truncated = 0
        encoder = ChatEncoder(tokenizer, stop_token_ids)
        first_lost: Sample | None = None
        for conversation in read_conversations(self.path):
            sample = encoder.encode(conversation)
            kept = self._cut(sample)
            if kept is not None:
                self._samples.append(kept)
            elif first_lost is None:
                first_lost = sample
        if first_lost is not None:
            self._report_lost(first_lost)
        self.statistics = self._measure()
        log.info("%s: %s", self.path, ", ".join(f"{key} {value}" for key, value in self.statistics.items()))

    def _cut(self, sample: Sample) -> Sample | None:
        n = self.seq_length
        self._truncated += len(sample) > n
        cut = Sample(sample.tokens[:n].clone(), sample.turns[:n].clone(), sample.where) if len(sample) > n else sample
        if _longest_turn(cut) >= 2:
            return cut
        self.dropped["nothing supervised within seq_length" if len(sample) > n else "answer of one token"] += 1
        return None

    def _report_lost(self, first: Sample) -> None:
        begins = int((first.turns > 0).nonzero()[0])
        example = f"{first.where}, whose first answer begins at token {begins} of {len(first)}"
        if not self._samples:
            raise UserError(
                f"{self.path}: no supervised tokens are left with seq_length {self.seq_length} (for example "
                f"{example}): use a larger seq_length"
            )
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        log.warning("%s: dropped %s; the first is %s", self.path, reasons, example)

    def _measure(self) -> dict[str, float]:
        tokens = sum(len(sample) for sample in self._samples)
        supervised = sum(int((sample.turns > 0).sum()) for sample in self._samples)
        return {
            "conversations": len(self._samples),
            "dropped": self.dropped.total(),
            "truncated": self._truncated,
            "turns": sum(int(sample.turns.max()) for sample in self._samples),
            "tokens": tokens,
            "supervised": supervised,
            "supervised_share": round(supervised / tokens, 4),
            "longest": max(len(sample) for sample in self._samples),
        }

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class BatchLoader:
    """Micro-batches of one data-parallel rank.

    Under pipeline parallelism a loader belongs to a whole copy of the base: `dp_rank` and `dp_size` are the base's
    (`World.dp`), and every tensor and pipeline rank of the copy builds the same loader and reads the same batches.

    A global batch is `global_batch_size` consecutive places of the order; micro-batch m of rank r holds the places
    [(m * dp_size + r) * micro_batch_size, ...) of it, so the samples of a step do not depend on the layout.

    Args:
        micro_batch_size: rows in a micro-batch.
        global_batch_size: rows in a step over all data ranks and micro-batches.
        pad_multiple: the common length is a multiple of it (`World.sequence_multiple`).
        context: the ranks that share every sequence; they build the same loader.
        packing: several samples in one row of at most `dataset.seq_length` tokens; a row then counts as one sample.

    Raises UserError when the sizes do not divide, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 1234,
        shuffle: bool = True,
        pad_multiple: int = 1,
        device: torch.device | str = "cpu",
        packing: bool = False,
        pad_token_id: int = 0,
        context: ContextShard | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise UserError("the dataset holds no samples")
        if not 0 <= dp_rank < dp_size:
            raise UserError(f"dp_rank {dp_rank} is not one of {dp_size} ranks")
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise UserError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} "
                f"x data parallel size {dp_size}: use a multiple of {micro_batch_size * dp_size}"
            )
        self.dataset = dataset
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle = seed, shuffle
        self.pad_multiple, self.pad_token_id, self.device = pad_multiple, pad_token_id, device
        self.packing, self.context = packing, context
        lengths = [len(dataset[i]) for i in range(len(dataset))]
        self._rows = pack(lengths, dataset.seq_length) if packing else [[i] for i in range(len(dataset))]
        self._row_lengths = [sum(lengths[i] for i in row) for row in self._rows]
        self._orders: dict[int, list[int]] = {}

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def samples_per_epoch(self) -> int:
        """Rows in one pass over the data."""
        return len(self._rows)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            n = len(self._rows)
            order = torch.randperm(n, generator=generator).tolist() if self.shuffle else list(range(n))
            # A step touches neighbouring epochs only: forget the others.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1} | {epoch: order}
        return self._orders[epoch]

    def _row_at(self, place: int) -> int:
        epoch, inside = divmod(place, len(self._rows))
        return self._order(epoch)[inside]

    def step(self, consumed_samples: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins after `consumed_samples` rows, on `device`.

        All of them, on every rank, are padded to the longest row of the global batch, rounded up to `pad_multiple`.
        """
        rows = [self._row_at(consumed_samples + i) for i in range(self.global_batch_size)]
        longest = max(self._row_lengths[row] for row in rows)
        length = -(-longest // self.pad_multiple) * self.pad_multiple
        batches = []
        for m in range(self.num_microbatches):
            begin = (m * self.dp_size + self.dp_rank) * self.micro_batch_size
            chosen = rows[begin : begin + self.micro_batch_size]
            samples = [[self.dataset[i] for i in self._rows[row]] for row in chosen]
            ids = None if self.packing else tuple(chosen)
            batches.append(build_batch(samples, length, self.device, self.pad_token_id, ids, self.context))
        return batches
