"""Rows of a batch from samples: one sample a row, or several short ones packed one behind the other.

B rows, S row length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_spec.batch import Batch
from megatron_spec.context import ContextShard
from megatron_spec.data.chat import Sample


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the samples in each row, so that no row is longer than `capacity`.

    First fit decreasing: the longest sample first, each into the first row with room. Deterministic; the indices in
    a row are ascending and rows are ordered by their first index. A sample longer than `capacity` is an error
    (ValueError): cut samples before packing.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit a row of {capacity}")
    rows: list[list[int]] = []
    room: list[int] = []
    open_from = 0  # rows before this one are full to the brim
    smallest = min(lengths, default=0)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while open_from < len(rows) and room[open_from] < smallest:
            open_from += 1
        row = next((r for r in range(open_from, len(rows)) if room[r] >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return sorted(sorted(row) for row in rows)


def build_batch(
    rows: Sequence[Sequence[Sample]],
    length: int,
    device: torch.device | str,
    pad_token_id: int = 0,
    sample_ids: tuple[int, ...] | None = None,
    context: ContextShard | None = None,
) -> Batch:
    """A Batch [B, S=length] with the samples of each row one behind the other and padding at the end.

    Positions restart in every document, documents are numbered from 0 in a row (-1 on padding), turn numbers stay
    unique in a row. Padding continues the positions of the last document. Raises ValueError when a row is too long.
    """
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
            turn_offset = int(turns_BS[b].max())
            at = end
    return Batch(tokens_BS, positions_BS, turns_BS, documents_BS, sample_ids, context).to(device)
