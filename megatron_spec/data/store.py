"""Tokenised conversations on disk: written once per file, tokenizer and template, read sample by sample.

    FOLDER/meta.json     identity of file and tokenizer; written last, so a folder with it is complete
    FOLDER/tokens.bin    token ids of all samples, concatenated (uint16, or uint32 for larger vocabularies)
    FOLDER/lengths.bin   int32 [N]: tokens of each sample, not truncated
    FOLDER/lines.bin     int32 [N]: line of the file that each sample is from
    FOLDER/runs.bin      int32 [R, 3]: first token, token after the last, turn number of each supervised stretch
    FOLDER/run_counts.bin  int32 [N]: stretches of each sample
    FOLDER/rejected.bin  int32 [M]: tokens that the base put in place of rejected draft tokens, indices in their sample
    FOLDER/rejected_counts.bin  int32 [N]: those of each sample

Nothing here depends on seq_length: the reader truncates. Tokens are read with plain reads instead of a memory map, so a
run's memory does not grow with the part of the file it has read.

N samples, R stretches, M rejections, n tokens of one sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_object, write_json

FORMAT = 3
_FILES = ("tokens", "lengths", "lines", "runs", "run_counts", "rejected", "rejected_counts")
Array = NDArray[Any]


@dataclass
class Block:
    """Consecutive samples as flat arrays.

    Attributes:
        tokens: [sum n].
        lengths, lines, run_counts, rejected_counts: [N].
        runs: [R, 3].
        rejected: [M].
    """

    tokens: Array
    lengths: Array
    lines: Array
    runs: Array
    run_counts: Array
    rejected: Array
    rejected_counts: Array

    def supervised(self, seq_length: int) -> tuple[Array, Array]:
        """(supervised tokens, index of their sample in this block) within the first `seq_length` of each sample."""
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        sample = np.repeat(np.arange(len(self.lengths)), self.run_counts)
        begins = np.minimum(self.runs[:, 0], seq_length) + starts[sample]
        ends = np.minimum(self.runs[:, 1], seq_length) + starts[sample]
        sizes = ends - begins
        first = np.cumsum(sizes) - sizes
        numbers = np.repeat(begins - first, sizes) + np.arange(int(sizes.sum()))
        return self.tokens[numbers], np.repeat(sample, sizes)


def runs_of(turns: Array) -> Array:
    """int32 [R, 3] stretches of equal, supervised turn numbers in turns [n]."""
    edges = np.flatnonzero(np.diff(turns)) + 1
    begins, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(turns)]])
    keep = turns[begins] > 0
    return np.stack([begins[keep], ends[keep], turns[begins[keep]]], axis=1).astype(np.int32)


class StoreWriter:
    """Appends blocks; `finish` writes meta.json, with the largest token id and its line among the totals."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        # Room for ids past the tokenizer's: bases pad their vocabulary and may generate those ids.
        self.dtype = np.dtype(np.uint16 if vocab_size <= 60_000 else np.uint32)
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in _FILES}
        self._totals = {"samples": 0, "tokens": 0, "supervised": 0, "turns": 0, "longest": 0, "rejected": 0}
        self._largest = [-1, 0]

    def append(self, block: Block) -> None:
        """Append the next samples. Raises UserError for an id far outside the vocabulary."""
        largest = int(block.tokens.max(initial=0))
        if largest > np.iinfo(self.dtype).max:
            raise UserError(f"found token id {largest}, far beyond the tokenizer: answer_ids are damaged")
        for name in _FILES:
            dtype = self.dtype if name == "tokens" else np.dtype(np.int32)
            getattr(block, name).astype(dtype).tofile(self._files[name])
        totals = self._totals
        totals["samples"] += len(block.lengths)
        totals["tokens"] += len(block.tokens)
        totals["supervised"] += int((block.runs[:, 1] - block.runs[:, 0]).sum())
        totals["turns"] += len(block.runs)
        totals["rejected"] += len(block.rejected)
        totals["longest"] = max(totals["longest"], int(block.lengths.max(initial=0)))
        if largest > self._largest[0]:
            sample = int(np.searchsorted(np.cumsum(block.lengths), int(block.tokens.argmax()), side="right"))
            self._largest = [largest, int(block.lines[sample])]

    def finish(self, about: dict[str, Any]) -> None:
        """Close the files and write meta.json."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        totals = {**self._totals, "largest_id": self._largest}
        write_json(self.folder / "meta.json", {"format": FORMAT, "dtype": self.dtype.name, **totals, **about})

    def abandon(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class TokenStore:
    """Reads what `StoreWriter` wrote. Keeps lengths, lines and offsets in memory: 32 bytes per sample.

    Raises UserError when the folder is incomplete or a file is shorter than meta.json says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = read_object(folder / "meta.json")
        self.dtype = np.dtype(self.meta["dtype"])
        N = self.meta["samples"]
        self.lengths = np.fromfile(folder / "lengths.bin", dtype=np.int32)
        self.lines = np.fromfile(folder / "lines.bin", dtype=np.int32)
        run_counts = np.fromfile(folder / "run_counts.bin", dtype=np.int32)
        rejected_counts = np.fromfile(folder / "rejected_counts.bin", dtype=np.int32)
        self.starts, self.rejected_starts = _starts(self.lengths), _starts(rejected_counts)
        self.run_starts = _starts(run_counts)
        sizes = {"tokens": int(self.starts[-1]) * self.dtype.itemsize, "runs": int(self.run_starts[-1]) * 12}
        sizes["rejected"] = int(self.rejected_starts[-1]) * 4
        wrong = [name for name, size in sizes.items() if (folder / f"{name}.bin").stat().st_size != size]
        if {len(self.lengths), len(self.lines), len(run_counts), len(rejected_counts)} != {N} or wrong:
            raise UserError(f"{folder} is damaged ({', '.join(wrong) or 'lengths'}): remove it; it will be rebuilt")
        self._tokens, self._runs = _Reader(folder / "tokens.bin"), _Reader(folder / "runs.bin")
        self._rejected = _Reader(folder / "rejected.bin")

    def __len__(self) -> int:
        return len(self.lengths)

    def block(self, first: int, after: int) -> Block:
        """Samples first .. after-1."""
        begin, end = int(self.starts[first]), int(self.starts[after])
        tokens = np.frombuffer(self._tokens.read(begin, end, self.dtype.itemsize), dtype=self.dtype)
        counts = np.diff(self.run_starts[first : after + 1])
        lengths, lines = self.lengths[first:after], self.lines[first:after]
        begin, end = int(self.rejected_starts[first]), int(self.rejected_starts[after])
        rejected = np.frombuffer(self._rejected.read(begin, end, 4), dtype=np.int32)
        rejected_counts = np.diff(self.rejected_starts[first : after + 1])
        return Block(tokens, lengths, lines, self.runs(first, after), counts, rejected, rejected_counts)

    def runs(self, first: int, after: int) -> Array:
        """int32 [R, 3] supervised stretches of samples first .. after-1."""
        begin, end = int(self.run_starts[first]), int(self.run_starts[after])
        return np.frombuffer(self._runs.read(begin, end, 12), dtype=np.int32).reshape(-1, 3)

    def ranges(self, tokens: int = 2**22) -> Iterator[tuple[int, int]]:
        """(first, after) of consecutive blocks of about `tokens` tokens that cover the store."""
        first = 0
        while first < len(self):
            after = int(np.searchsorted(self.starts, self.starts[first] + tokens, side="right")) - 1
            after = max(after, first + 1)
            yield first, after
            first = after


def _starts(counts: Array) -> Array:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


class _Reader:
    """Reads records of a file by number; opens it on first use, and again in a forked process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}

    def read(self, begin: int, end: int, size: int) -> bytes:
        """Items begin..end-1 of `size` bytes each."""
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), self.path.open("rb"))
        wanted = (end - begin) * size
        found = os.pread(self._file[1].fileno(), wanted, begin * size) if wanted else b""
        if len(found) != wanted:
            raise UserError(f"{self.path} ends early: remove its folder; it will be rebuilt")
        return found
