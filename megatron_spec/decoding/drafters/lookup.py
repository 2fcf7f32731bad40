"""Suffix automaton drafting: propose what followed the longest suffix of the text that occurred before. No model.

Alone (`SA`), or with a draft model: the continuation of a match that is long enough replaces the model's tokens
(TensorRT-LLM's SA and `sa_config`); there the device finds the same match (`decoding.matches`).

The automaton represents all substrings of a text in at most two states per token, and appends a token in amortised
constant time (Blumer et al., 1985). The suffix link of its last state is the longest suffix that occurred before: the
match. The continuation of its first occurrence is proposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from megatron_spec.decoding.drafters.base import Context, Proposal
from megatron_spec.decoding.drafters.ngram import TextDrafter
from megatron_spec.decoding.verify import Drafted


class SuffixAutomaton:
    """Suffix automaton of a growing text.

    Attributes:
        text: the tokens so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        # A state represents the substrings that end at the same positions: the longest has `_length` tokens, and the
        # state of `_link` has the longest shorter suffix that also ends elsewhere. State 0 is the empty string.
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
        """The state whose longest string is that of `state` followed by `token`; split off if there is none yet."""
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
        """(length of the longest suffix that occurred before, index after its first occurrence); (0, 0) if none did.

        Args:
            size: match suffixes of this length only; -1: the longest.
        """
        state = self._link[self._last]
        if state <= 0 or self._length[state] < size:
            return 0, 0
        while size > 0 and self._length[self._link[state]] >= size:
            state = self._link[state]
        return (size if size > 0 else self._length[state]), self._first_end[state] + 1

    def propose(self, count: int, size: int = -1) -> list[int]:
        """Up to `count` tokens after the match; [] without a match."""
        length, start = self.match(size)
        return self.text[start : start + count] if length else []


def padded(found: Sequence[Sequence[int]], count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [B, count] proposals padded with zeros, int64 [B] their lengths), in one transfer."""
    lines = [[*tokens, *[0] * (count - len(tokens)), len(tokens)] for tokens in found]
    both_BX = torch.tensor(lines, dtype=torch.int64).to(device)
    return both_BX[:, :count], both_BX[:, count]


def replaced(drafted: Drafted, tokens_BN: torch.Tensor, count_B: torch.Tensor) -> Drafted:
    """A chain with the rows replaced for which a lookup has a proposal.

    The distribution of a proposed token is one-hot (rejection sampling).

    Args:
        tokens_BN: int64 proposals.
        count_B: int64 number of leading tokens of each that are proposed; less than one: none, the row is kept.
    """
    index_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    taken_B1 = count_B[:, None] > 0
    q_BNV = drafted.q_BNV
    if q_BNV is not None:
        certain_BNV = torch.zeros_like(q_BNV).scatter_(2, tokens_BN[:, :, None], 1.0)
        q_BNV = torch.where(taken_B1[:, :, None], certain_BNV, q_BNV)
    return dataclasses.replace(
        drafted,
        q_BNV=q_BNV,
        tokens_BN=torch.where(taken_B1, tokens_BN, drafted.tokens_BN),
        valid_BN=torch.where(taken_B1, index_N < count_B[:, None], drafted.valid_BN),
    )


class LookupDrafter(TextDrafter):
    """Chains from each sequence's own automaton.

    Args:
        max_matching_ngram_size: length of the suffixes to look up; -1: the longest that occurred before.
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
        for row, unread in enumerate(self.unread(context)):
            self.automata[row].extend(unread)
        rows = context.tokens_BL.shape[0]
        found = [automaton.propose(count, self.size) for automaton in self.automata[:rows]]
        return Proposal(*padded(found, count, context.tokens_BL.device))
