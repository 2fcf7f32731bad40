"""The suffix automaton against a brute-force search, alone and with a draft: the text is the base's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.drafters.lookup import SuffixAutomaton, replaced
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.options import check_options
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.decoding.verify import Drafted, Draws, verify
from tests.unit_tests.decoding.cpu_recorder import CpuRecorder
from tests.unit_tests.decoding.tiny_models import CONFIG


def searched(text: list[int], size: int) -> tuple[int, int]:
    """`SuffixAutomaton.match` by comparing every position."""
    for length in [size] if size > 0 else range(len(text) - 1, 0, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[len(text) - length :]:
                return length, start + length
    return 0, 0


def test_the_longest_suffix_that_occurred_before() -> None:
    numbers = random.Random(0)
    for letters in (1, 2, 3, 6):
        for _ in range(20):
            text = [numbers.randrange(letters) for _ in range(40)]
            automaton = SuffixAutomaton()
            for n, token in enumerate(text, start=1):
                automaton.extend([token])
                for size in (-1, 1, 2, 4):
                    assert automaton.match(size) == searched(text[:n], size), (text[:n], size)
    automaton = SuffixAutomaton([1, 2, 3, 9, 8, 1, 2, 3])
    assert automaton.propose(2) == [9, 8] and automaton.propose(2, threshold=4) == []
    assert automaton.propose(9, threshold=3) == [9, 8, 1, 2, 3] and SuffixAutomaton([4]).propose(3) == []


def test_only_rows_with_a_match_are_replaced() -> None:
    drafted = Drafted(torch.tensor([[1, 2, 3]] * 3), torch.tensor([[True, True, False]] * 3), None, 3)
    found = replaced(drafted, [[7, 8], []])  # the third row is idle
    assert found.tokens_BN.tolist() == [[7, 8, 0], [1, 2, 3], [1, 2, 3]]
    assert found.valid_BN.tolist() == [[True, True, False]] * 3
    assert replaced(drafted, [[7]]).valid_BN.tolist()[0] == [True, False, False]


LONG = CONFIG.replace(max_new_tokens=48)


def test_text_equals_the_base(tiny: Any) -> None:
    prompts = [p + p for p in tiny.prompts[:4]]
    expected = [g.tokens for g in decode(tiny.base, prompts, LONG, set())]
    alone = decode(tiny.base, prompts, LONG.replace(decoding_type="SA"), set())
    short = decode(tiny.base, prompts, LONG.replace(decoding_type="SA", max_matching_ngram_size=1), set())
    assert [g.tokens for g in alone] == [g.tokens for g in short] == expected
    assert sum(sum(g.accepted_lengths) for g in alone) > 0  # greedy text of a tiny base repeats itself
    draft = decode(tiny.base, prompts, LONG, set(), draft=tiny.draft)
    accepted = {0: [g.accepted_lengths for g in draft]}
    for threshold in (1, 4, 1000):
        config = LONG.replace(sa_threshold=threshold)
        beside = decode(tiny.base, prompts, config, set(), draft=tiny.draft)
        assert [g.tokens for g in beside] == expected
        accepted[threshold] = [g.accepted_lengths for g in beside]
        replayed = decode(tiny.base, prompts, config, set(), draft=tiny.draft, session=DecodeSession(CpuRecorder()))
        assert [g.tokens for g in replayed] == expected
        assert [g.accepted_lengths for g in replayed] == accepted[threshold]
    assert accepted[1000] == accepted[0] != accepted[1]


def test_sampled_text_is_the_same(tiny: Any) -> None:
    hot = CONFIG.replace(temperature=0.7)
    expected = [g.tokens for g in decode(tiny.base, tiny.prompts, hot, set())]
    found = decode(tiny.base, tiny.prompts, hot.replace(sa_threshold=1), set(), draft=tiny.draft)
    assert [g.tokens for g in found] == expected


def test_rejection_sampling_with_a_one_hot_lookup(tiny: Any) -> None:
    """Token 2 is looked up where the draft had drawn from a flat distribution: tokens keep the base's distribution."""
    trials, p_V = 20000, torch.tensor([0.1, 0.5, 0.2, 0.2])
    draws = torch.rand(trials, 2, 2, generator=torch.Generator().manual_seed(3))
    drawn = torch.randint(0, 4, (trials, 1), generator=torch.Generator().manual_seed(4))
    drafted = Drafted(drawn, torch.ones_like(drawn).bool(), None, 1, torch.full((trials, 1, 4), 0.25))
    found = replaced(drafted, [[2]] * trials)
    config = DecodeConfig(temperature=1.0, use_rejection_sampling=True)
    logits = p_V.log().expand(trials, 2, -1)
    verdict = verify(logits, found, Draws(draws[:, :, 0], draws[:, :, 1]), config, tiny.base.world.tp)
    shares_V = verdict.emitted_BP[:, 0].bincount(minlength=4) / trials
    torch.testing.assert_close(shares_V, p_V, atol=0.015, rtol=0)
    assert float(verdict.accepted_B.float().mean()) == pytest.approx(0.2, abs=0.015)
    hot = CONFIG.replace(temperature=0.7, use_rejection_sampling=True, sa_threshold=1)
    assert all(g.tokens for g in decode(tiny.base, tiny.prompts, hot, set(), draft=tiny.draft))


def test_conflicting_options_are_refused() -> None:
    with pytest.raises(UserError, match="replaces the tokens of a chain"):
        check_options(DecodeConfig(sa_threshold=4, use_dynamic_tree=True), "Eagle3")
    with pytest.raises(UserError, match="--sa-threshold is an option of"):
        check_options(DecodeConfig(sa_threshold=4), "NGram")
    for size, kind in ((0, "SA"), (-1, "NGram")):
        with pytest.raises(UserError, match="max_matching_ngram_size must be at least 1"):
            DecodeConfig(decoding_type=kind, max_matching_ngram_size=size)  # type: ignore[arg-type]
    assert DecodeConfig(decoding_type="SA", max_matching_ngram_size=-1).max_matching_ngram_size == -1
    assert NGramDrafter().size == 2
