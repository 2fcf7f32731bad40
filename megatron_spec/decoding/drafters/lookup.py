"""Lookup by a suffix automaton: what followed the longest suffix of the text that occurred before. No model.

Alone (`SA`), or with a draft model: where the match is long enough, what followed it replaces the model's tokens
(TensorRT-LLM's SA and `sa_config`). The automaton holds every substring of a text in at most two states per token and
grows by a token in constant time on average (Blumer et al., 1985). The suffix link of its last state is the longest
suffix that occurred before, which is the match; the first of its occurrences proposes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from megatron_spec.decoding.drafters.base import Context, Proposal
from megatron_spec.decoding.drafters.ngram import TextDrafter
from megatron_spec.decoding.verify import Drafted


class SuffixAutomaton:
    """All substrings of a text that grows.

    Attributes:
        text: the tokens so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        # A state stands for substrings that end at the same places; its longest is `_length` long, and those of its
        # link are shorter suffixes of it. State 0 is the empty string.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._first_end, self._last = [-1], [0], [-1], 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def _state(self, successors: dict[int, int], link: int, length: int, first_end: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self._first_end.append(first_end)
        return len(self._next) - 1

    def _append(self, token: int) -> None:
        new = self._state({}, 0, self._length[self._last] + 1, len(self.text))
        self.text.append(token)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != -1:
            self._link[new] = self._suffix(state, token)
        self._last = new

    def _suffix(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` followed by `token`; split off where there is none yet."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        split = self._state(
            dict(self._next[found]), self._link[found], self._length[state] + 1, self._first_end[found]
        )  # fmt: skip
        while state != -1 and self._next[state].get(token) == found:
            self._next[state][token] = split
            state = self._link[state]
        self._link[found] = split
        return split

    def match(self, size: int = -1) -> tuple[int, int]:
        """(length of the longest suffix that occurred before, index after its first occurrence); (0, 0) for none.

        Args:
            size: look at suffixes of this length alone; -1: the longest.
        """
        state = self._link[self._last]
        if state <= 0 or self._length[state] < size:
            return 0, 0
        while size > 0 and self._length[self._link[state]] >= size:
            state = self._link[state]
        return (size if size > 0 else self._length[state]), self._first_end[state] + 1

    def propose(self, count: int, size: int = -1, threshold: int = 1) -> list[int]:
        """Up to `count` tokens that followed the match; [] for a match shorter than `threshold`."""
        length, start = self.match(size)
        return self.text[start : start + count] if length >= threshold else []


def padded(found: Sequence[Sequence[int]], count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [B, count] proposals filled up with zeros, int64 [B] their lengths), in one transfer."""
    lines = [[*tokens, *[0] * (count - len(tokens)), len(tokens)] for tokens in found]
    both_BX = torch.tensor(lines, dtype=torch.int64).to(device)
    return both_BX[:, :count], both_BX[:, count]


def replaced(drafted: Drafted, found: Sequence[Sequence[int]]) -> Drafted:
    """A chain in which the rows that a lookup found something for (the first ones of `found`) take that instead.

    What a lookup proposes is certain: its distribution has all of its weight on the token (rejection sampling).
    """
    batch, count = drafted.tokens_BN.shape
    lines = [*found, *[[] for _ in range(batch - len(found))]]
    tokens_BN, length_B = padded(lines, count, drafted.tokens_BN.device)
    index_N, taken_B1 = torch.arange(count, device=length_B.device), length_B[:, None] > 0
    q_BNV = drafted.q_BNV
    if q_BNV is not None:
        certain_BNV = torch.zeros_like(q_BNV).scatter_(2, tokens_BN[:, :, None], 1.0)
        q_BNV = torch.where(taken_B1[:, :, None], certain_BNV, q_BNV)
    return dataclasses.replace(
        drafted,
        q_BNV=q_BNV,
        tokens_BN=torch.where(taken_B1, tokens_BN, drafted.tokens_BN),
        valid_BN=torch.where(taken_B1, index_N < length_B[:, None], drafted.valid_BN),
    )


class LookupDrafter(TextDrafter):
    """Chains from each sequence's own automaton.

    Args:
        max_matching_ngram_size: length of the suffixes that are looked up; -1: the longest that occurred before.
    """

    def __init__(self, max_matching_ngram_size: int = -1) -> None:
        self.size = max_matching_ngram_size

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        super().open(rows, max_length)
        self.automata = [SuffixAutomaton() for _ in range(rows)]

    def begin(self, row: int) -> None:
        """See TextDrafter."""
        self.automata[row] = SuffixAutomaton()
        self.texts[row] = self.automata[row].text

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        super().move_rows(source, target)
        for s, t in zip(source, target, strict=True):
            self.automata[t] = self.automata[s]

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Rows without a match propose nothing."""
        for row, fresh in enumerate(self.fresh(context)):
            self.automata[row].extend(fresh)
        rows = context.tokens_BL.shape[0]
        found = [automaton.propose(count, self.size) for automaton in self.automata[:rows]]
        return Proposal(*padded(found, count, context.tokens_BL.device))
