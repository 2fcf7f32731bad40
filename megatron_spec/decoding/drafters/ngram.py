"""Prompt lookup: the draft is what followed the last words the last time they appeared. No model, no state.

B rows, L token buffer, K draft tokens. Sources: prompt lookup decoding; TensorRT-LLM's NGram decoding, whose option
names are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.decoding.drafters.base import Context, Observation


def lookup(tokens_L: Tensor, max_matching_ngram_size: int, count: int, use_oldest: bool = False) -> Tensor:
    """int64 [<= count] tokens that followed an earlier occurrence of the longest matching suffix, [0] without one.

    Suffixes of max_matching_ngram_size, then fewer, down to one token are tried; of several occurrences of the same
    suffix the latest wins, or the oldest when `use_oldest`.
    """
    length = tokens_L.shape[0]
    for size in range(min(max_matching_ngram_size, length - 1), 0, -1):
        windows = tokens_L[: length - 1].unfold(0, size, 1)
        hits = (windows == tokens_L[length - size :]).all(dim=-1).nonzero()[:, 0]
        if hits.numel():
            start = int(hits[0 if use_oldest else -1]) + size
            return tokens_L[start : start + count]
    return tokens_L[:0]


class NGramDrafter:
    """Prompt lookup over each sequence's own tokens (prompt and answer)."""

    def __init__(self, max_matching_ngram_size: int = 2, is_use_oldest: bool = False) -> None:
        if max_matching_ngram_size < 1:
            raise UserError(f"max_matching_ngram_size must be at least 1, found {max_matching_ngram_size}")
        self.size, self.use_oldest = max_matching_ngram_size, is_use_oldest

    def open(self, rows: int, max_length: int) -> None:
        """Nothing to prepare."""

    def observe(self, seen: Observation) -> None:
        """Nothing to remember: the context holds every token."""

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """Nothing to move."""

    def prepare_draft_tokens(self, context: Context, count: int) -> tuple[Tensor, Tensor | None]:
        """See Drafter. Rows without a match propose nothing."""
        rows = context.tokens_BL.shape[0]
        drafts_BK = context.tokens_BL.new_zeros(rows, count)
        counts = []
        for row, length in enumerate(context.lengths_B.tolist()):
            found = lookup(context.tokens_BL[row, :length], self.size, count, self.use_oldest)
            drafts_BK[row, : found.numel()] = found
            counts.append(found.numel())
        return drafts_BK, torch.tensor(counts, device=drafts_BK.device)
