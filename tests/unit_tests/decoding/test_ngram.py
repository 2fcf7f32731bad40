"""Prompt lookup and its pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.decoding.drafters import Context, Observation
from megatron_spec.decoding.drafters.ngram import NGramDrafter

TEXT = [1, 2, 3, 9, 2, 3, 7, 3, 8, 1, 2, 3]


def begin(drafter: NGramDrafter, row: int) -> None:
    """A new sequence starts in a row."""
    empty = torch.zeros(1, 1, dtype=torch.int64)
    drafter.observe(Observation(row, empty, empty, empty[0], torch.empty(0), torch.empty(0), prefill=True))


def propose(drafter: NGramDrafter, texts: list[list[int]], count: int = 2) -> list[list[int]]:
    width = max(map(len, texts)) + 1
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in texts])
    lengths = [len(t) for t in texts]
    found = drafter.prepare_draft_tokens(Context(tokens, torch.tensor(lengths), lengths=lengths), count)
    assert found.proposed_B is not None
    return [row[:n].tolist() for row, n in zip(found.tokens_BN, found.proposed_B.tolist(), strict=True)]


def once(text: list[int], count: int = 2, **options: Any) -> list[int]:
    drafter = NGramDrafter(**options)
    drafter.open(1, 64)
    begin(drafter, 0)
    return propose(drafter, [text], count)[0]


def test_longest_match_wins_then_age() -> None:
    assert once(TEXT, max_matching_ngram_size=3) == [9, 2]  # 1 2 3 at the start
    assert once(TEXT, max_matching_ngram_size=2) == [9, 2]  # 2 3, the older of two
    assert once(TEXT, max_matching_ngram_size=2, is_use_oldest=False) == [7, 3]
    assert once(TEXT, 5, max_matching_ngram_size=1, is_use_oldest=False) == [8, 1, 2, 3]  # the end of the text cuts it
    assert once([1, 2, 3]) == once([4]) == []
    assert once([4, 4]) == [4]


def test_one_continuation_is_kept_unless_all_are() -> None:
    assert once(TEXT, max_matching_ngram_size=2, is_use_oldest=False, is_keep_all=False) == [9, 2]
    text = [5, 6, 5, 7, 8, 9, 5]  # behind 5 comes 6 5, then 7 8, when two are asked for
    assert once(text, 2, is_use_oldest=False) == [7, 8]
    assert once(text, 2, is_use_oldest=False, is_keep_all=False) == [6, 5]


def test_a_continuation_grows_with_the_text() -> None:
    drafter = NGramDrafter(1, is_keep_all=False)
    drafter.open(1, 64)
    begin(drafter, 0)
    assert propose(drafter, [[5, 5]], 3) == [[5]]
    assert propose(drafter, [[5, 5, 6]], 3) == [[]]
    assert propose(drafter, [[5, 5, 6, 7, 5]], 3) == [[5, 6, 7]]  # not the single 5 of the beginning


def test_pools_are_shared_or_private_and_move_with_their_rows() -> None:
    for public, expected in ((True, [[2, 3], [2, 3]]), (False, [[], [2, 3]])):
        drafter = NGramDrafter(1, is_public_pool=public)
        drafter.open(2, 64)
        begin(drafter, 0)
        begin(drafter, 1)
        assert propose(drafter, [[1], [1, 2, 3, 1]]) == expected
        drafter.move_rows([1], [0])
        assert propose(drafter, [[1, 2, 3, 1]]) == [[2, 3]]
        begin(drafter, 0)
        assert propose(drafter, [[1]]) == ([[2, 3]] if public else [[]])


def test_incremental_pool_equals_full_pool() -> None:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(4, (60,), generator=generator).tolist()
    drafter = NGramDrafter(3)
    drafter.open(1, 64)
    begin(drafter, 0)
    for length in range(1, 60):
        found = propose(drafter, [text[:length]], 3)[0]
        assert found == once(text[:length], 3, max_matching_ngram_size=3), length


def test_no_pattern_is_refused() -> None:
    with pytest.raises(UserError, match="max_matching_ngram_size"):
        NGramDrafter(0)
