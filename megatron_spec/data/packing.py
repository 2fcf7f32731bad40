"""Rows of a batch from samples: one sample per row, or several short ones packed together.

B rows, S row length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_spec.batch import Batch
from megatron_spec.data.chat import Sample
from megatron_spec.runtime.context import ContextShard


@dataclass(frozen=True)
class Rows:
    """The samples of each row.

    Attributes:
        samples: sample indices, row by row.
        starts: [rows + 1] where each row begins in `samples`.
        lengths: [rows] tokens of each row.
    """

    samples: NDArray[Any]
    starts: NDArray[Any]
    lengths: NDArray[Any]

    @staticmethod
    def single(lengths: NDArray[Any]) -> Rows:
        """One sample per row."""
        return Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> list[int]:
        found: list[int] = self.samples[self.starts[row] : self.starts[row + 1]].tolist()
        return found


def pack(lengths: Sequence[int] | NDArray[Any], capacity: int) -> Rows:
    """Pack samples into rows of at most `capacity` tokens.

    Best fit decreasing: longest sample first, each into the fullest row that still has room. Deterministic; samples are
    ascending within a row and rows are ordered by their first sample. Raises ValueError for a sample longer than
    `capacity`: truncate samples before packing.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a sample of {int(sizes.max())} tokens does not fit a row of {capacity}")
    row_of = np.empty(len(sizes), dtype=np.int64)
    rooms: list[int] = []  # ascending: free tokens of the open rows, without duplicates
    rows_with: dict[int, list[int]] = {}  # room -> rows
    count, smallest = 0, int(sizes.min(initial=1))
    for index in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[index])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = count, capacity
            count += 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        row_of[index] = row
        room -= length
        if room >= smallest:  # otherwise nothing fits into this row
            if room not in rows_with:
                insort(rooms, room)
                rows_with[room] = []
            rows_with[room].append(row)
    return _rows(row_of, sizes, count)


def _rows(row_of: NDArray[Any], sizes: NDArray[Any], count: int) -> Rows:
    first = np.full(count, len(sizes))
    np.minimum.at(first, row_of, np.arange(len(sizes)))
    place = np.empty(count, dtype=np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(count)
    row_of = place[row_of]
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=count), out=starts[1:])
    totals = np.bincount(row_of, weights=sizes, minlength=count).astype(np.int64)
    return Rows(np.argsort(row_of, kind="stable"), starts, totals)


def build_batch(
    rows: Sequence[Sequence[Sample]],
    length: int,
    device: torch.device | str,
    pad_token_id: int = 0,
    sample_ids: tuple[tuple[int, ...], ...] | None = None,
    context: ContextShard | None = None,
) -> Batch:
    """A Batch [B, S=length] with the samples of each row concatenated, then padding.

    Positions restart in every document, documents are numbered from 0 within a row (-1 on padding), turn numbers stay
    unique within a row. Padding continues the positions of the last document. Raises ValueError if a row is too long.
    """
    rejected_BS = torch.zeros(len(rows), length, dtype=torch.bool)
    tokens_BS = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    positions_BS = torch.zeros(len(rows), length, dtype=torch.int64)
    turns_BS = torch.zeros(len(rows), length, dtype=torch.int32)
    documents_BS = torch.full((len(rows), length), -1, dtype=torch.int32)
    for b, row in enumerate(rows):
        at = turn_offset = 0
        for document, sample in enumerate(row):
            end = at + len(sample)
            if end > length:
                raise ValueError(f"row {b} holds more than {length} tokens")
            tokens_BS[b, at:end] = sample.tokens
            positions_BS[b, at:] = torch.arange(length - at)
            turns_BS[b, at:end] = torch.where(sample.turns > 0, sample.turns + turn_offset, 0)
            documents_BS[b, at:end] = document
            rejected_BS[b, at + sample.rejected] = True
            turn_offset = int(turns_BS[b].max())
            at = end
    rejected = rejected_BS if rejected_BS.any() else None
    return Batch(tokens_BS, positions_BS, turns_BS, documents_BS, sample_ids, context, rejected_BS=rejected).to(device)
