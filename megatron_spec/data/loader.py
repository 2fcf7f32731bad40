"""Samples, and the order in which ranks read them.

The order is a pure function of (seed, samples consumed, data-parallel rank): resuming needs no stored state, and a run
continues with the same samples in another layout. All micro-batches of a global batch have the same length, because
pipeline stages agree on shapes beforehand.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_spec.batch import Batch
from megatron_spec.config import UserError, expect
from megatron_spec.data.chat import Sample
from megatron_spec.data.packing import Rows, build_batch, pack
from megatron_spec.data.tokenise import FAULTS, open_tokens
from megatron_spec.data.tokenizer import beyond_vocabulary
from megatron_spec.runtime.context import ContextShard

log = logging.getLogger(__name__)

__all__ = ["BatchLoader", "ConversationDataset", "Dataset", "Sample"]


class Dataset(Protocol):
    """Samples by index, none longer than `seq_length`."""

    seq_length: int

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`."""
        ...


def lengths_of(dataset: Dataset) -> NDArray[Any]:
    """Tokens of each sample, [samples]; reads the samples only if the dataset does not store their lengths."""
    known = getattr(dataset, "lengths", None)
    return np.array([len(dataset[i]) for i in range(len(dataset))] if known is None else known, dtype=np.int32)


class ConversationDataset:
    """The conversations of a JSON lines file, tokenised once (`data.tokenise`), truncated to `seq_length` when read.

    A conversation whose truncation leaves no two supervised tokens in one turn (a draft is trained on pairs) is
    dropped with a warning.

    Attributes:
        store: tokens of the complete file, not truncated.
        kept: indices in the store of the conversations in this dataset.
        lengths: int32 [samples] tokens of each, after truncation.
        dropped: reason -> number of dropped conversations.
        statistics: statistics of the mask, as logged.

    Args:
        cache, workers, template_kwargs: see `data.tokenise.open_tokens`.
        vocab_size: vocabulary of the base; None: token ids are not checked.

    Raises UserError like `open_tokens`, for a token id outside the base's vocabulary, and if nothing supervised is
    left.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: Any,
        seq_length: int,
        stop_token_ids: Collection[int] = (),
        cache: Path | str | None = None,
        workers: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        expect(seq_length, int, "seq_length")
        if not 2 <= seq_length < 1 << 31:
            raise UserError(f"seq_length must be at least 2 and below 2^31, found {seq_length}")
        self.path = Path(path)
        self.seq_length = seq_length
        self.store = open_tokens(self.path, tokenizer, stop_token_ids, cache, workers, template_kwargs)
        largest, line = self.store.meta["largest_id"]
        if vocab_size is not None and largest >= vocab_size:
            raise beyond_vocabulary(f"{self.path} line {line}", largest, vocab_size, tokenizer)
        longest, figures = self._measure_runs()
        self.kept = np.flatnonzero(longest >= 2)
        self.lengths = np.minimum(self.store.lengths[self.kept], seq_length)
        self.dropped: Counter[str] = Counter()
        self._report_dropped(np.flatnonzero(longest < 2))
        self._report_faults()
        self.statistics = self._statistics(figures)
        log.info("%s: %s", self.path, ", ".join(f"{key} {value}" for key, value in self.statistics.items()))

    def _measure_runs(self) -> tuple[NDArray[Any], Counter[str]]:
        """(longest supervised stretch of each truncated sample, turns and supervised tokens of those kept)."""
        longest = np.zeros(len(self.store), dtype=np.int32)
        figures: Counter[str] = Counter()
        for first, after in self.store.ranges():
            runs = self.store.runs(first, after)
            counts = np.diff(self.store.run_starts[first : after + 1])
            sizes = np.minimum(runs[:, 1], self.seq_length) - np.minimum(runs[:, 0], self.seq_length)
            sample = np.repeat(np.arange(after - first), counts)
            np.maximum.at(longest[first:after], sample, sizes)
            inside = (longest[first:after] >= 2)[sample] & (sizes > 0)
            figures["supervised"] += int(sizes[inside].sum())
            figures["turns"] += int(inside.sum())
        return longest, figures

    def _report_dropped(self, lost: NDArray[Any]) -> None:
        if not len(lost):
            return
        short = self.store.lengths[lost] > self.seq_length
        reasons = {"nothing supervised within seq_length": int(short.sum()), "answer of one token": int((~short).sum())}
        self.dropped.update({reason: count for reason, count in reasons.items() if count})
        first = int(lost[0])
        begins = int(self.store.runs(first, first + 1)[0, 0])
        length = self.store.lengths[first]
        example = f"{self._where(first)}, whose first answer begins at token {begins} of {length}"
        if not len(self.kept):
            raise UserError(
                f"{self.path}: no supervised tokens are left with seq_length {self.seq_length} (for example "
                f"{example}): use a larger seq_length"
            )
        counts = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        log.warning("%s: dropped %s; the first is %s", self.path, counts, example)

    def _report_faults(self) -> None:
        """Warn about answers that training does not see as they were written or are served."""
        turns = self.store.meta["turns"]
        for name, (count, line) in self.store.meta["faults"].items():
            log.warning("%s: %d of %d answers %s; the first: line %d", self.path, count, turns, FAULTS[name], line)

    def _statistics(self, figures: Counter[str]) -> dict[str, float]:
        tokens = int(self.lengths.sum(dtype=np.int64))
        return {
            "conversations": len(self),
            "dropped": self.dropped.total(),
            "truncated": int((self.store.lengths > self.seq_length).sum()),
            "turns": figures["turns"],
            "tokens": tokens,
            "supervised": figures["supervised"],
            "supervised_share": round(figures["supervised"] / tokens, 4),
            "longest": int(self.lengths.max()),
            **{f"answers {name}".replace("_", " "): count for name, (count, _) in self.store.meta["faults"].items()},
        }

    def _where(self, number: int) -> str:
        return f"{self.path} line {self.store.lines[number]}"

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self.kept[index])
        block = self.store.block(number, number + 1)
        n = int(self.lengths[index])
        turns = np.zeros(n, dtype=np.int32)
        for begin, end, turn in block.runs.tolist():
            turns[begin:end] = turn
        tokens = block.tokens[:n].astype(np.int64)
        rejected = torch.from_numpy(block.rejected[block.rejected < n].astype(np.int64))
        return Sample(torch.from_numpy(tokens), torch.from_numpy(turns), self._where(number), rejected=rejected)

    def supervised(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(supervised tokens, line of each) of all samples, a few million at a time."""
        is_kept = np.zeros(len(self.store), dtype=bool)
        is_kept[self.kept] = True
        for first, after in self.store.ranges():
            block = self.store.block(first, after)
            tokens, sample = block.supervised(self.seq_length)
            kept = is_kept[first + sample]
            yield tokens[kept], block.lines[sample[kept]]


class BatchLoader:
    """Micro-batches of one data-parallel rank.

    Under pipeline parallelism a loader belongs to a replica of the base: `dp_rank` and `dp_size` are the base's
    (`World.dp`), and every tensor and pipeline rank of the replica builds the same loader and reads the same batches.

    A global batch is `global_batch_size` consecutive positions of the order; micro-batch m of rank r holds its
    positions [(m * dp_size + r) * micro_batch_size, ...), so the samples of a step do not depend on the layout.

    Args:
        micro_batch_size: rows per micro-batch.
        global_batch_size: rows per step over all data-parallel ranks and micro-batches.
        pad_multiple: pad rows to a multiple of it (`World.sequence_multiple`).
        context: the ranks that share every sequence; they build the same loader.
        packing: pack several samples into a row of at most `dataset.seq_length` tokens; a row then counts as a sample.

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
        self.context = context
        lengths = lengths_of(dataset)
        self._rows = pack(lengths, dataset.seq_length) if packing else Rows.single(lengths)
        self._orders: dict[int, NDArray[Any]] = {}

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank per step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def samples_per_epoch(self) -> int:
        """Rows in one pass over the data."""
        return len(self._rows)

    def _order(self, epoch: int) -> NDArray[Any]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            n = len(self._rows)
            order = torch.randperm(n, generator=generator).numpy() if self.shuffle else np.arange(n)
            # A step touches only adjacent epochs: drop the others.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1} | {epoch: order}
        return self._orders[epoch]

    def _row_at(self, position: int) -> int:
        epoch, inside = divmod(position, len(self._rows))
        return int(self._order(epoch)[inside])

    def step(self, consumed_samples: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins after `consumed_samples` rows, on `device`.

        All of them, on every rank, are padded to the longest row of the global batch, rounded up to `pad_multiple`.
        """
        rows = [self._row_at(consumed_samples + i) for i in range(self.global_batch_size)]
        longest = max(int(self._rows.lengths[row]) for row in rows)
        length = -(-longest // self.pad_multiple) * self.pad_multiple
        batches = []
        for m in range(self.num_microbatches):
            begin = (m * self.dp_size + self.dp_rank) * self.micro_batch_size
            ids = tuple(tuple(self._rows[row]) for row in rows[begin : begin + self.micro_batch_size])
            samples = [[self.dataset[i] for i in row] for row in ids]
            batches.append(build_batch(samples, length, self.device, self.pad_token_id, ids, self.context))
        return batches
