"""The suffix automaton against a brute-force search, alone; with a draft, the device's lookup against the automaton."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import rows
from megatron_spec.decoding.drafters.lookup import SuffixAutomaton, replaced
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.matches import extended, looked_up, matches_of
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
    assert automaton.propose(2) == [9, 8] and automaton.propose(2, size=4) == []
    assert automaton.propose(9) == [9, 8, 1, 2, 3] and SuffixAutomaton([4]).propose(3) == []


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
@pytest.mark.parametrize("most", [1, 5])
def test_the_device_finds_what_the_automaton_finds(letters: int, most: int) -> None:
    """Texts of one batch that grow by different numbers of tokens at a time, with meaningless tokens after them."""
    numbers, count, threshold = random.Random(letters), 4, 2
    texts = [[numbers.randrange(letters) for _ in range(110)] for _ in range(6)]
    lengths = torch.tensor([1, 2, 3, 7, 20, 33])
    matches, tokens = torch.zeros(6, 112, dtype=torch.int32), torch.randint(letters, (6, 112))
    for row, (text, n) in enumerate(zip(texts, lengths.tolist(), strict=True)):
        matches[row, :n] = torch.tensor(matches_of(text[:n]))
    automata = [SuffixAutomaton(text[:n]) for text, n in zip(texts, lengths.tolist(), strict=True)]
    found_some = 0
    for _ in range(14):
        grown = torch.tensor([numbers.randrange(most + 1) for _ in texts])
        for row, (text, n, k) in enumerate(zip(texts, lengths.tolist(), grown.tolist(), strict=True)):
            tokens[row, : n + k] = torch.tensor(text[: n + k])
            automata[row].extend(text[n : n + k])
        matches = extended(matches, tokens, lengths, lengths + grown, most)
        lengths = lengths + grown
        found_BN, known_B = looked_up(matches, tokens, lengths, threshold, count)
        for row, automaton in enumerate(automata):
            expected = automaton.propose(count) if automaton.match()[0] >= threshold else []
            assert found_BN[row, : int(known_B[row])].tolist() == expected
            found_some += bool(expected)
            size = len(automaton.text)
            assert matches[row, :size].tolist() == matches_of(automaton.text) and not matches[row, size:].any()
    assert found_some > 5


def test_only_rows_with_a_match_are_replaced() -> None:
    drafted = Drafted(torch.tensor([[1, 2, 3]] * 3), torch.tensor([[True, True, False]] * 3), None, 3)
    found = replaced(drafted, torch.tensor([[7, 8, 9]] * 3), torch.tensor([1, 0, -2]))
    assert found.tokens_BN.tolist() == [[7, 8, 9], [1, 2, 3], [1, 2, 3]]
    assert found.valid_BN.tolist() == [[True, False, False], *[[True, True, False]] * 2]


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


def test_the_base_alone_looks_nothing_up(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`validate` times it with the configuration of the draft; a lookup of which nothing is used would slow it."""
    monkeypatch.setattr(rows, "extended", lambda *_: pytest.fail("matches were extended"))
    found = decode(tiny.base, tiny.prompts, CONFIG.replace(sa_threshold=1), set())
    assert [g.tokens for g in found] == tiny.answers


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
    found = replaced(drafted, torch.full((trials, 1), 2), torch.ones(trials, dtype=torch.int64))
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
