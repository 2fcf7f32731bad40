"""Acceptance statistics of speculative decoding.

Acceptance length (AL) = tokens emitted per base forward after the prefill = accepted draft tokens + 1, averaged over
verification steps, not over requests (a mean over requests favours short answers). The bonus token of each step is
counted, so a useless draft has AL 1 and a perfect one max_draft_len + 1. The confidence interval resamples prompts,
because the steps of one answer are not independent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # intervals alone need it: --help of the benchmarks does without
    import torch


class HasSteps(Protocol):
    """The fields of a Generation that the statistics read."""

    accepted_lengths: list[int]
    drafted_lengths: list[int]
    drafted_steps: int
    accepted_after_end: int


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance of a set of answers; all None or empty when no verification step took place.

    Attributes:
        prompts: number of answers.
        steps: verification steps of all answers.
        acceptance_length: see the module docstring.
        engine_acceptance_length: as engines count it: 1 + accepted tokens per step that proposed anything, including
            tokens accepted after the end of an answer. Comparable with vLLM's metrics.
        acceptance_length_ci95: bounds of the percentile bootstrap interval over prompts.
        acceptance_per_position: for draft position i = 1.., the share of the steps that proposed a token there in
            which it (and so all before it) was accepted.
        conditional_acceptance_per_position: the same, among steps in which all earlier positions were accepted; None
            for a position that was never reached.
        full_acceptance_share: share of the steps that proposed anything in which the complete proposal was accepted.
        draft_tokens_accepted_share: accepted draft tokens / proposed draft tokens.
    """

    prompts: int
    steps: int
    acceptance_length: float | None
    acceptance_length_ci95: tuple[float, float] | None
    acceptance_per_position: tuple[float, ...]
    conditional_acceptance_per_position: tuple[float | None, ...]
    full_acceptance_share: float | None
    draft_tokens_accepted_share: float | None
    engine_acceptance_length: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON-serialisable values."""
        return dataclasses.asdict(self)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def bootstrap_ci95(
    tokens: Sequence[int], steps: Sequence[int], resamples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """2.5 % and 97.5 % quantiles of sum(tokens) / sum(steps) over resampled prompts; None if no resample has a step.

    Args:
        tokens: tokens emitted by the verification steps of each prompt.
        steps: verification steps of each prompt, each at least 1.
    """
    return _bounds(_resampled_lengths([(tokens, steps)], resamples, seed)[0])


def change_ci95(
    found: tuple[Sequence[int], Sequence[int]],
    reference: tuple[Sequence[int], Sequence[int]],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Interval of the acceptance length of `found` minus that of `reference`, both measured on the same prompts; None
    if no resample has steps of both.

    Paired: both are computed on the same resampled prompts, so a prompt's difficulty cancels.

    Args:
        found, reference: (tokens, steps) of each prompt; entry i of all of them is prompt i. A prompt without steps in
            either run (an answer of one token) is left out; at least one prompt must have steps.
    """
    stepped = [x for x in zip(*found, *reference, strict=True) if x[1] or x[3]]
    found_tokens, found_steps, reference_tokens, reference_steps = zip(*stepped, strict=True)
    runs = [(found_tokens, found_steps), (reference_tokens, reference_steps)]
    lengths = _resampled_lengths(runs, resamples, seed)
    return _bounds(lengths[0] - lengths[1])


def _resampled_lengths(runs: Sequence[tuple[Sequence[int], Sequence[int]]], resamples: int, seed: int) -> torch.Tensor:
    """[runs, resamples] acceptance lengths of several runs over the same prompts, resampled jointly."""
    import torch

    sums_N2P = torch.tensor([[list(tokens), list(steps)] for tokens, steps in runs], dtype=torch.float64)
    prompts = sums_N2P.shape[2]
    generator = torch.Generator().manual_seed(seed)
    weights_RP = torch.ones(prompts, dtype=torch.float64).expand(resamples, -1)
    drawn_RP = torch.multinomial(weights_RP, prompts, replacement=True, generator=generator)
    totals_N2R = sums_N2P[:, :, drawn_RP].sum(dim=-1)
    return totals_N2R[:, 0] / totals_N2R[:, 1]


def _bounds(values_R: torch.Tensor) -> tuple[float, float] | None:
    import torch

    # NaN: none of the drawn prompts has a step in one of the two runs. Happens only with a handful of prompts.
    if bool(values_R.isnan().all()):
        return None
    low, high = torch.nanquantile(values_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def acceptance_stats(generations: Sequence[HasSteps], seed: int = 0) -> AcceptanceStats:
    """Statistics of the given answers; `seed` makes the confidence interval reproducible."""
    stepped = [g for g in generations if g.accepted_lengths]
    accepted = [a for g in stepped for a in g.accepted_lengths]
    drafted = [d for g in stepped for d in g.drafted_lengths]
    steps, pairs = len(accepted), list(zip(accepted, drafted, strict=True))
    positions = range(1, max(drafted, default=0) + 1)
    proposed = [sum(d >= i for d in drafted) for i in positions]
    taken = [sum(a >= i for a in accepted) for i in positions]
    reached = [sum(d >= i and a >= i - 1 for a, d in pairs) for i in positions]
    return AcceptanceStats(
        prompts=len(generations),
        steps=steps,
        acceptance_length=_share(sum(accepted) + steps, steps),
        acceptance_length_ci95=bootstrap_ci95(
            [sum(g.accepted_lengths) + len(g.accepted_lengths) for g in stepped],
            [len(g.accepted_lengths) for g in stepped],
            seed=seed,
        )
        if stepped
        else None,
        acceptance_per_position=tuple(t / p for t, p in zip(taken, proposed, strict=True)),
        conditional_acceptance_per_position=tuple(_share(t, r) for t, r in zip(taken, reached, strict=True)),
        full_acceptance_share=_share(sum(a == d > 0 for a, d in pairs), sum(d > 0 for d in drafted)),
        draft_tokens_accepted_share=_share(sum(accepted), sum(drafted)),
        engine_acceptance_length=_engine_length(generations),
    )


def _engine_length(generations: Sequence[HasSteps]) -> float | None:
    steps = sum(g.drafted_steps for g in generations)
    return _share(sum(sum(g.accepted_lengths) + g.accepted_after_end for g in generations) + steps, steps)


@dataclass
class _Steps:
    """Some verification steps of an answer. Engine counts exist only for complete answers, so they stay 0."""

    accepted_lengths: list[int]
    drafted_lengths: list[int]
    drafted_steps: int = 0
    accepted_after_end: int = 0


def by_context(
    generations: Sequence[HasSteps], prompt_tokens: Sequence[int], group: Callable[[int], str], seed: int = 0
) -> dict[str, AcceptanceStats]:
    """Statistics per group of context lengths: the tokens known before a step, prompt included.

    Shows a draft that degrades with context length, even within one answer.

    Args:
        prompt_tokens: length of each prompt.
        group: maps a number of tokens to the name of its group; names sort by length.
    """
    steps: dict[str, list[_Steps]] = {}
    for generation, known in zip(generations, prompt_tokens, strict=True):
        mine: dict[str, _Steps] = {}
        known += 1  # the prefill's token
        for accepted, drafted in zip(generation.accepted_lengths, generation.drafted_lengths, strict=True):
            part = mine.setdefault(group(known), _Steps([], []))
            part.accepted_lengths.append(accepted)
            part.drafted_lengths.append(drafted)
            known += accepted + 1
        for name, part in mine.items():
            steps.setdefault(name, []).append(part)
    return {name: acceptance_stats(parts, seed) for name, parts in sorted(steps.items())}


def by_category(
    generations: Sequence[HasSteps], categories: Sequence[str], seed: int = 0
) -> dict[str, AcceptanceStats]:
    """Statistics per category, in alphabetical order. `categories[i]` belongs to `generations[i]`."""
    return {
        name: acceptance_stats([g for g, c in zip(generations, categories, strict=True) if c == name], seed)
        for name in sorted(set(categories))
    }
