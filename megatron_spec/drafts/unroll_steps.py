"""Rows that the fused unroll computes at each step, and their layout in its buffers.

R rows of a micro-batch (s * B + b), T draft steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.batch import Batch


class Steps:
    """Rows of every step: all R rows at step 0, `later` rows from step 1 on (those that some later loss reads).

    Buffers over all steps have the rows of step 0, then those of each later step.
    """

    def __init__(self, rows: list[Tensor], active: list[Tensor], R: int, compact_below: float) -> None:
        self.T, self.R = len(rows), R
        compact = self.T > 1 and len(active[1]) < compact_below * R
        self.index: Tensor | None = active[1] if compact else None
        self.later = R if self.index is None else len(self.index)
        self.inverse = None if self.index is None else self.place(self.index, R)
        """Row of step 0 -> row of later steps, or -1."""
        self.places = [self.place(self.inside(k, r), self.count(k)) for k, r in enumerate(rows)]
        """Per step: row -> index among the LM head's input rows, or -1."""

    @staticmethod
    def place(rows_R: Tensor, total: int) -> Tensor:
        """int32 [total]: i at rows_R[i], -1 elsewhere."""
        place = torch.full((total,), -1, dtype=torch.int32, device=rows_R.device)
        place[rows_R] = torch.arange(len(rows_R), dtype=torch.int32, device=rows_R.device)
        return place

    def compacted(self, k: int) -> Tensor | None:
        """Row of step k -> row of step 0; None if they are the same."""
        return None if k == 0 else self.index

    def inside(self, k: int, rows_R: Tensor) -> Tensor:
        """Rows of step 0 as rows of step k."""
        index = self.compacted(k)
        return rows_R if index is None else torch.searchsorted(index, rows_R)

    def count(self, k: int) -> int:
        """Number of rows that step k computes."""
        return self.R if k == 0 else self.later

    def span(self, start: int, end: int) -> slice:
        """Rows of steps start..end-1 in a buffer over all steps."""
        first = [0, *(self.R + i * self.later for i in range(self.T))]
        return slice(first[start], first[end])

    def groups(self, at_once: int) -> list[tuple[int, int]]:
        """(start, end) of groups of steps with at most `at_once` rows (at least one step), last steps first."""
        found, end = [], self.T
        while end:
            start = end - 1
            while start and self.span(start - 1, end).stop - self.span(start - 1, end).start <= at_once:
                start -= 1
            found.append((start, end))
            end = start
        return found


class TokenRows:
    """Rows of the embeddings that the steps read, [N * B]: row j at step k reads the token j + 1 + k of its sequence.

    Every chunk of a sequence (the whole sequence, or the chunks of a context parallel rank) is followed by the T - 1
    tokens after it.

    Attributes:
        first: int32 [R], the row that each row of step 0 reads; `later`: the same less k * B for the rows of step k.
            None: the same rows.
        steps_first: int32 [N * B - (T - 1) * B], the row of step 0 that reads each row at step 0, -1 for none; and
            `steps_later` of later steps at k = 0. None: the same rows.
    """

    def __init__(self, steps: Steps, batch: Batch) -> None:
        (B, S), device = batch.tokens_BS.shape, batch.tokens_BS.device
        extra, chunks = steps.T - 1, [(0, S)] if batch.context is None else batch.context.chunks(S)
        parts = [torch.arange(a + 1, e + 1 + extra, device=device) for a, e in chunks]
        self.tokens_N = torch.cat(parts)
        """int64 [N], position in the sequence of each row's token."""
        self.first: Tensor | None = None
        self.later, self.steps_first, self.steps_later = steps.index, self.first, steps.inverse
        if batch.context is None:
            return
        first = torch.arange(steps.R, device=device)
        self.first = first + first // (steps.R // len(chunks)) * (extra * B)
        self.later = self.first if steps.index is None else self.first[steps.index]
        total = (len(self.tokens_N) - extra) * B
        self.steps_first, self.steps_later = steps.place(self.first, total), steps.place(self.later, total)

    def of_step(self, k: int) -> Tensor | None:
        """`first` or `later`."""
        return self.first if k == 0 else self.later
