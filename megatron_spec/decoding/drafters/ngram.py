"""N-gram drafting (prompt lookup): propose what followed the last tokens where they occurred before. No model.

A pool maps patterns of up to max_matching_ngram_size tokens to their continuations, up to the draft length. The
continuation of the longest suffix of the text in the pool is proposed. Sources: prompt lookup decoding; TensorRT-LLM's
NGram decoding, whose option names are used.

B rows of the running batch, K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_spec.config import UserError
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal

Tokens = tuple[int, ...]


@dataclass
class Pool:
    """Patterns and their continuations, oldest first.

    Attributes:
        keep_all: keep every continuation of a pattern; else only the first, until a longer one occurs.
    """

    keep_all: bool
    found: dict[Tokens, list[Tokens]] = field(default_factory=dict)

    def add(self, pattern: Tokens, following: Tokens) -> None:
        """Add a continuation. It replaces a known one that it extends."""
        known = self.found.setdefault(pattern, [])
        if following in known:
            return
        for i, old in enumerate(known):
            if following[: len(old)] == old or (not self.keep_all and len(following) > len(old)):
                known[i] = following
                return
        if not known or (self.keep_all and not any(old[: len(following)] == following for old in known)):
            known.append(following)

    def get(self, pattern: Tokens, oldest: bool) -> Tokens:
        """A continuation, () for an unknown pattern."""
        known = self.found.get(pattern)
        return () if not known else known[0 if oldest else -1]


class TextDrafter(Drafter):
    """Base class of drafters that read the text of each row on the host, each token once."""

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.texts: list[list[int]] = [[] for _ in range(rows)]  # tokens of each row that have been read

    def begin(self, row: int) -> None:
        """Start a new sequence in this row."""
        self.texts[row] = []

    def observe(self, seen: Observation) -> None:
        """See Drafter. Only a prefill matters: it resets rows."""
        for row in range(seen.first, seen.first + seen.slots_BS.shape[0] if seen.prefill else 0):
            self.begin(row)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter. Freed rows are reset before they are used again."""
        for s, t in zip(source, target, strict=True):
            self.texts[t] = self.texts[s]

    def unread(self, context: Context) -> list[list[int]]:
        """Tokens of each row that are not in `texts` yet; only these are copied from the device."""
        known = torch.tensor([len(text) for text in self.texts[: len(context.lengths)]])
        counts = (torch.tensor(context.lengths) - known).tolist()
        index_BN = known[:, None] + torch.arange(max(counts))
        index_BN = index_BN.clamp(max=context.tokens_BL.shape[1] - 1).to(context.tokens_BL.device)
        rows = context.tokens_BL.gather(1, index_BN).tolist()
        return [row[:n] for row, n in zip(rows, counts, strict=True)]


class NGramDrafter(TextDrafter):
    """Chains from pools of n-grams, one for all sequences or one for each."""

    def __init__(
        self, max_matching_ngram_size: int = 2, is_keep_all: bool = True, is_use_oldest: bool = True,
        is_public_pool: bool = True,
    ) -> None:  # fmt: skip
        if max_matching_ngram_size < 1:
            raise UserError(f"max_matching_ngram_size must be at least 1, found {max_matching_ngram_size}")
        self.size, self.keep_all, self.oldest = max_matching_ngram_size, is_keep_all, is_use_oldest
        self.public = is_public_pool

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        super().open(rows, max_length)
        shared = Pool(self.keep_all)
        self.pools = [shared if self.public else Pool(self.keep_all) for _ in range(rows)]

    def begin(self, row: int) -> None:
        """See TextDrafter. Starts with an empty pool unless the pool is shared."""
        super().begin(row)
        if not self.public:
            self.pools[row] = Pool(self.keep_all)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        super().move_rows(source, target)
        for s, t in zip(source, target, strict=True):
            self.pools[t] = self.pools[s]

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Rows without a match propose nothing."""
        rows, device = context.tokens_BL.shape[0], context.tokens_BL.device
        for row, unread in enumerate(self.unread(context)):
            self._add(row, unread, count)
        found = [self._lookup(self.pools[row], self.texts[row])[:count] for row in range(rows)]
        drafts_BK = torch.tensor([[*tokens, *[0] * (count - len(tokens))] for tokens in found], dtype=torch.int64)
        return Proposal(drafts_BK.to(device), torch.tensor([len(tokens) for tokens in found], device=device))

    def _add(self, row: int, unread: list[int], count: int) -> None:
        """Add the patterns whose continuation is new or longer."""
        pool, text = self.pools[row], self.texts[row]
        read = len(text)
        text.extend(unread)
        for size in range(1, self.size + 1):
            for start in range(max(0, read - size - count), len(text) - size):
                end = start + size
                if min(end + count, len(text)) > read:
                    pool.add(tuple(text[start:end]), tuple(text[end : end + count]))

    def _lookup(self, pool: Pool, text: list[int]) -> Tokens:
        for size in range(min(self.size, len(text)), 0, -1):
            if found := pool.get(tuple(text[len(text) - size :]), self.oldest):
                return found
        return ()
