"""Acceptance figures of hand-written steps."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_spec.decoding.started import Generation
from megatron_spec.evaluation.acceptance import acceptance_stats, bootstrap_ci95, by_category, by_context, change_ci95


def answer(*steps: tuple[int, int]) -> Generation:
    """An answer from (accepted, drafted) per verification step."""
    return Generation(accepted_lengths=[a for a, _ in steps], drafted_lengths=[d for _, d in steps])


LONG = answer((3, 3), (3, 3), (0, 3), (1, 3), (2, 3), (3, 3))
SHORT = answer((0, 3), (0, 1))


def test_length_is_averaged_over_steps_not_over_answers() -> None:
    stats = acceptance_stats([LONG, SHORT])
    assert stats.steps == 8 and stats.prompts == 2
    assert stats.acceptance_length == pytest.approx((12 + 8) / 8)  # a mean over answers would be (3 + 1) / 2


def test_positions_count_only_steps_that_proposed_there() -> None:
    stats = acceptance_stats([LONG, SHORT])
    assert stats.acceptance_per_position == pytest.approx((5 / 8, 4 / 7, 3 / 7))
    assert stats.conditional_acceptance_per_position == pytest.approx((5 / 8, 4 / 5, 3 / 4))
    assert stats.full_acceptance_share == pytest.approx(3 / 8)
    assert stats.draft_tokens_accepted_share == pytest.approx(12 / 22)


def test_length_as_engines_count_it() -> None:
    """Steps that proposed nothing do not count, tokens accepted after the end of an answer do."""
    found = answer((3, 3), (0, 0), (1, 1))
    found.drafted_steps, found.accepted_after_end = 2, 2
    assert acceptance_stats([found]).engine_acceptance_length == 1 + (4 + 2) / 2
    assert acceptance_stats([found]).acceptance_length == pytest.approx(1 + 4 / 3)
    assert acceptance_stats([answer((0, 0))]).engine_acceptance_length is None


def test_steps_without_drafts_are_not_fully_accepted() -> None:
    stats = acceptance_stats([answer((0, 0), (2, 2))])
    assert stats.full_acceptance_share == 1.0 and stats.acceptance_length == 2.0
    assert acceptance_stats([answer((0, 2))]).conditional_acceptance_per_position == (0.0, None)


def test_steps_are_grouped_by_the_tokens_known_before_them() -> None:
    """Prompts of 4 and 9 tokens; the prefill adds one, each step what it accepted and one more."""
    answers = [answer((3, 3), (0, 3), (1, 3)), answer((2, 3), (0, 3))]  # steps at 5, 9, 10 and at 10, 13 tokens
    found = by_context(answers, [4, 9], lambda tokens: "short" if tokens < 10 else "long")
    assert {name: s.steps for name, s in found.items()} == {"long": 3, "short": 2}
    assert found["short"] == acceptance_stats([answer((3, 3), (0, 3))])
    assert found["long"] == acceptance_stats([answer((1, 3)), answer((2, 3), (0, 3))])
    assert by_context([Generation()], [4], str) == {}


def test_answers_without_steps_are_allowed() -> None:
    stats = acceptance_stats([Generation()])
    assert stats.prompts == 1 and stats.steps == 0
    assert stats.acceptance_length is None and stats.acceptance_length_ci95 is None
    json.dumps(stats.to_dict())


def test_interval_contains_the_mean_is_seeded_and_shrinks() -> None:
    few = [answer(*[(i % 4, 3)] * 5) for i in range(8)]
    low, high = acceptance_stats(few, seed=1).acceptance_length_ci95 or (0, 0)
    assert 1 < low < 2.5 < high < 4
    assert acceptance_stats(few, seed=1).acceptance_length_ci95 == (low, high)
    uneven = ([3, 7, 20, 11, 5, 9], [2, 3, 7, 6, 5, 4])
    assert len({bootstrap_ci95(*uneven, resamples=100, seed=s) for s in range(4)}) > 1
    many_low, many_high = acceptance_stats(few * 16).acceptance_length_ci95 or (0, 0)
    assert (many_high - many_low) * 2 < high - low
    # Prompts are resampled, not steps: with one prompt there is nothing to resample.
    assert bootstrap_ci95([20], [8]) == (2.5, 2.5)
    # Normal approximation for equal steps: mean +- 1.96 * sd / sqrt(n), sd of (1, 2, 3, 4) is 1.118.
    assert many_high - many_low == pytest.approx(2 * 1.96 * 1.118 / 128**0.5, rel=0.1)


def test_categories_are_separate() -> None:
    found = by_category([LONG, SHORT, LONG], ["math", "code", "math"])
    assert list(found) == ["code", "math"]
    assert found["code"].acceptance_length == 1.0 and found["math"].acceptance_length == 3.0
    assert found["math"].prompts == 2


def test_change_is_paired_by_prompt() -> None:
    """Prompts differ by far more than the two runs, which the paired interval removes."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(20, 40, (50,), generator=generator)
    tokens = (steps * (1 + torch.rand(50, generator=generator))).long()
    better = tokens + torch.randint(1, 4, (50,), generator=generator)
    one, two = (tokens.tolist(), steps.tolist()), (better.tolist(), steps.tolist())
    assert change_ci95(one, one) == (0.0, 0.0)
    low, high = change_ci95(two, one)
    assert 0.03 < low < float((better - tokens).sum() / steps.sum()) < high < 0.12
    apart = [bootstrap_ci95(*x) for x in (one, two)]
    assert high - low < 0.2 * (apart[0][1] - apart[0][0]) and apart[0][1] > apart[1][0]
    assert change_ci95(one, two) == pytest.approx((-high, -low))


def test_change_equals_a_plain_loop() -> None:
    """The same draws, question by question: both lengths of a resample are of the same questions."""
    one, two = ([9, 4, 7, 30], [3, 4, 5, 11]), ([8, 6, 7, 21], [4, 4, 3, 9])
    generator, changes = torch.Generator().manual_seed(5), []
    for drawn in torch.multinomial(torch.ones(50, 4, dtype=torch.float64), 4, True, generator=generator).tolist():
        lengths = [sum(tokens[i] for i in drawn) / sum(steps[i] for i in drawn) for tokens, steps in (one, two)]
        changes.append(lengths[0] - lengths[1])
    changes.sort()

    def quantile(q: float) -> float:  # between the two values next to it
        low = int(49 * q)
        return changes[low] + (49 * q - low) * (changes[low + 1] - changes[low])

    assert change_ci95(one, two, resamples=50, seed=5) == pytest.approx((quantile(0.025), quantile(0.975)))


def test_change_with_answers_without_steps() -> None:
    """Answers without steps in both runs are ignored; in one run, some resamples have no length, none is NaN."""
    one, two = ([9, 4], [3, 4]), ([8, 6], [4, 4])
    padded = [([*tokens, 0], [*steps, 0]) for tokens, steps in (one, two)]
    assert change_ci95(*padded) == change_ci95(one, two)
    # draws of the first prompt alone, and of both: 9/3 - 8/4 and 9/3 - 14/8
    assert change_ci95(([9, 0], [3, 0]), two) == pytest.approx((1.0, 1.25))
    assert change_ci95(([9, 0], [3, 0]), ([0, 8], [0, 4]), resamples=1) is None  # one question, drawn twice
    assert change_ci95(([9], [3]), ([0], [0])) is None, "one prompt, with steps in one run alone"
