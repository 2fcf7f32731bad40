"""Statistics of a conversation file as training sees it: lengths, masks, turns, truncated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.packing import pack

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class DataReport:
    """Statistics of a conversation file.

    Attributes:
        statistics: `ConversationDataset.statistics`.
        dropped: reason -> conversations.
        lengths: tokens of a conversation before truncation, at `QUANTILES`.
        answer_lengths: supervised tokens of a turn before truncation, at `QUANTILES`.
        turns: number of assistant turns -> conversations, before truncation.
        lost_tokens: tokens removed by truncation.
        packed_rows: rows of `seq_length` that hold all conversations with --packing.
        packed_fill: share of these rows that is not padding.
    """

    statistics: dict[str, float]
    dropped: dict[str, int]
    lengths: list[int]
    answer_lengths: list[int]
    turns: dict[int, int]
    lost_tokens: int
    packed_rows: int
    packed_fill: float


def inspect(dataset: ConversationDataset) -> DataReport:
    """Report on a dataset. Reads no tokens, only lengths and positions of turns."""
    store = dataset.store
    sizes: list[NDArray[Any]] = []
    for first, after in store.ranges():
        runs = store.runs(first, after)
        sizes.append(runs[:, 1] - runs[:, 0])
    turns, counts = np.unique(np.diff(store.run_starts), return_counts=True)
    rows = len(pack(dataset.lengths, dataset.seq_length))
    return DataReport(
        dict(dataset.statistics),
        dict(dataset.dropped),
        _quantiles(store.lengths),
        _quantiles(np.concatenate(sizes)),
        dict(zip(turns.tolist(), counts.tolist(), strict=True)),
        int(np.maximum(store.lengths - dataset.seq_length, 0).sum(dtype=np.int64)),
        rows,
        float(dataset.lengths.sum(dtype=np.int64)) / (rows * dataset.seq_length),
    )


def _quantiles(values: NDArray[Any]) -> list[int]:
    found: list[int] = np.quantile(values, QUANTILES, method="nearest").astype(int).tolist()
    return found


def pieces(dataset: ConversationDataset, index: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """(text, supervised) for each stretch of one sample, as the draft is trained on it."""
    sample = dataset[index]
    turns = sample.turns.numpy()
    edges = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
    tokens = sample.tokens.tolist()
    return [(tokenizer.decode(tokens[a:b], skip_special_tokens=False), bool(turns[a] > 0)) for a, b in pairwise(edges)]
