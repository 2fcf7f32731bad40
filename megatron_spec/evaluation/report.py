"""The figures of a validation: the content of validate.json.

Text: the output with the draft, compared with the base's own token by token. Acceptance: over all answers, by prompt
category, by prompt length and by context length. Speed: measured, and predicted from the measured cost of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.started import Generation
from megatron_spec.evaluation.acceptance import AcceptanceStats, acceptance_stats, by_category, by_context
from megatron_spec.generation.parts import parts
from megatron_spec.runtime.files import object_in, require_own

PROMPT_LENGTHS = (64, 256, 1024)
"""Bounds of the groups by prompt length, in tokens."""

CONTEXT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Bounds of the groups by the tokens known before a step."""


@dataclass(frozen=True)
class Mismatch:
    """An answer that differs with the draft.

    Attributes:
        identifier: identifier of the prompt.
        round: 0 for the first question.
        position: index in the answer of the first token that differs.
        base_token: token of the base alone at `position`; None when its answer has ended.
        speculative_token: token at `position` with the draft; None when that answer has ended.
        top_gap: difference of the base's two largest logits after the common prefix.
        near_tie: the gap is within what rounding can do (see `validate.tie_tolerance`).
        exact_tie: greedy decoding, and both tokens have the largest logit: either of them is right.
    """

    identifier: str
    round: int
    position: int
    base_token: int | None
    speculative_token: int | None
    top_gap: float
    near_tie: bool
    exact_tie: bool = False


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, summed over the ranks of one replica.

    Attributes:
        base, draft: weights in this run's precision (a fake-quantised base is in high precision; the files of an
            exported one are smaller).
        base_cache, draft_cache: keys and values of `sequences` texts of `tokens` tokens.
        sequences: the batch size.
        tokens: length of the longest prompt plus answer.
    """

    base: int
    draft: int
    base_cache: int
    draft_cache: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Speed:
    """Answer tokens per wall-clock second, prefill included, over all data-parallel ranks.

    `seconds` is the time of the slowest data-parallel rank.
    """

    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class StepCosts:
    """Median seconds of one step at the run's batch size, measured on some of its prompts.

    Attributes:
        base: a step of the base alone (one row per sequence).
        draft: proposing the draft tokens.
        verify: the base's forward over the last known token and the draft tokens.
        observe: updating the draft with the accepted tokens.
    """

    base: float
    draft: float
    verify: float
    observe: float

    def speedup(self, acceptance_length: float) -> float:
        """Speed-up over the base alone, without prefill: AL * base / (draft + verify + observe)."""
        return acceptance_length * self.base / max(self.draft + self.verify + self.observe, 1e-12)


@dataclass(frozen=True)
class Run:
    """Decoding with one draft length.

    Attributes:
        max_draft_len: draft length of this run.
        text_identical: every answer is equal token by token, exact ties aside; None where the text need not be equal
            (rejection sampling draws other random numbers, typical and relaxed acceptance emit other tokens).
        mismatches: every answer that differs, where the text must be equal.
        exact_ties: mismatches that begin where two tokens have the largest logit; not differences.
        differences: the other mismatches.
        near_ties: differences that rounding explains.
        speculative: speed with the draft.
        speedup: ratio of the measured speeds.
        predicted_speedup: computed from the acceptance length and the costs.
        costs: cost of a step; None when no step took place.
        acceptance: over all answers.
        acceptance_by_category: per prompt category.
        acceptance_by_prompt_length: per group of prompt lengths, in tokens.
        acceptance_by_context_length: per group of context lengths, in tokens known before a step.
        acceptance_distribution: for n = 0, 1, ... the share of steps in which n draft tokens were accepted.
    """

    max_draft_len: int
    text_identical: bool | None
    mismatches: tuple[Mismatch, ...]
    exact_ties: int
    differences: int
    near_ties: int
    speculative: Speed
    speedup: float
    predicted_speedup: float | None
    costs: StepCosts | None
    acceptance: AcceptanceStats
    acceptance_by_category: dict[str, AcceptanceStats]
    acceptance_by_prompt_length: dict[str, AcceptanceStats]
    acceptance_by_context_length: dict[str, AcceptanceStats]
    acceptance_distribution: tuple[float, ...]

    @property
    def unexplained(self) -> int:
        """Differences that neither a tie nor rounding explains: a bug in the verification."""
        return self.differences - self.near_ties


@dataclass(frozen=True)
class Report:
    """Content of validate.json: the run with the first draft length at the top level, all runs in `sweep`.

    Attributes:
        answers: number of answers compared.
        truncated: number of the base's answers without a stop token.
        skipped: prompts (or later rounds) that were not asked, and why.
        base: speed without a draft.
        memory: memory of base, draft and caches.
        runs: one per draft length.
        decode: decoding configuration.
        about: what was measured: draft, base, device.
    """

    answers: int
    truncated: int
    skipped: tuple[str, ...]
    base: Speed
    memory: Memory
    runs: tuple[Run, ...]
    decode: dict[str, Any]
    about: dict[str, Any]

    @property
    def first(self) -> Run:
        """The run of the first draft length."""
        return self.runs[0]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable values, the most wanted figures first."""
        runs = [_flat(run) for run in self.runs]
        nested = {"base": dataclasses.asdict(self.base), "memory": dataclasses.asdict(self.memory), "sweep": runs}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("runs", *nested)}
        return {**runs[0], **rest, **nested}


def _flat(run: Run) -> dict[str, Any]:
    found = run.acceptance
    top = {
        "acceptance_length": found.acceptance_length,
        "ci95": found.acceptance_length_ci95,
        "engine_acceptance_length": found.engine_acceptance_length,
        "acceptance_per_position": found.acceptance_per_position,
        "text_identical": run.text_identical,
    }
    return {**top, **dataclasses.asdict(run)}


def require_report(path: Path | str, flag: str = "--output") -> None:
    """Raise UserError if the report's file is something else, which would be lost."""
    path = Path(path)
    require_own(path, lambda p: {"about", "sweep"} <= object_in(p).keys(), "a report of validate.py", flag)
    for part in parts(path):  # a killed generate.py leaves its answers under the same names
        require_own(part, lambda p: {"about", "draft_lens"} <= object_in(p, lines=True).keys(), "of validate.py", flag)


@dataclass
class Answer:
    """One answer without the draft, and with it once per draft length.

    Attributes:
        identifier, category, round: identity of the prompt.
        prompt_tokens: length of the prompt, history included.
        base: answer of the base alone.
        drafted: answers with the draft, one per draft length.
        mismatches: one per draft length, None where the texts are equal.
    """

    identifier: str
    category: str
    round: int
    prompt_tokens: int
    base: Generation
    drafted: list[Generation]
    mismatches: list[Mismatch | None]

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Answer:
        """Inverse of `dataclasses.asdict`."""
        mismatches = [None if m is None else Mismatch(**m) for m in values["mismatches"]]
        drafted = [Generation(**g) for g in values["drafted"]]
        return Answer(**{**values, "base": Generation(**values["base"]), "drafted": drafted, "mismatches": mismatches})


@dataclass
class Part:
    """Measurements of one data-parallel rank.

    Attributes:
        answers: in the order of generation.
        seconds: without a draft, then with each draft length.
        skipped: see Report.
    """

    answers: list[Answer]
    seconds: list[float]
    skipped: list[str]


def length_group(tokens: int, bounds: Sequence[int] = PROMPT_LENGTHS) -> str:
    """Name of the group that a number of tokens falls into: '0001-0064', ...; names sort by length."""
    low, width = 1, len(str(bounds[-1]))
    for high in bounds:
        if tokens <= high:
            return f"{low:0{width}d}-{high:0{width}d}"
        low = high + 1
    return f"{low:0{width}d} and more"


def context_group(tokens: int) -> str:
    """`length_group` of the tokens known before a step."""
    return length_group(tokens, CONTEXT_LENGTHS)


def _speed(generations: Sequence[Generation], seconds: float) -> Speed:
    tokens = sum(len(g.tokens) for g in generations)
    return Speed(tokens, seconds, tokens / max(seconds, 1e-9))


def _distribution(generations: Sequence[Generation]) -> tuple[float, ...]:
    lengths = [n for g in generations for n in g.accepted_lengths]
    return tuple(lengths.count(n) / len(lengths) for n in range(max(lengths, default=-1) + 1))


def _run(
    answers: Sequence[Answer], which: int, length: int, seconds: float, base: Speed, cost: StepCosts | None, seed: int,
    same_text: bool,
) -> Run:  # fmt: skip
    """Figures of the draft length at index `which`."""
    drafted = [a.drafted[which] for a in answers]
    categories, groups = [a.category for a in answers], [length_group(a.prompt_tokens) for a in answers]
    mismatches = tuple(m for a in answers if (m := a.mismatches[which]) is not None)
    different = [m for m in mismatches if not m.exact_tie]
    speed, acceptance = _speed(drafted, seconds), acceptance_stats(drafted, seed)
    predicted = None
    if cost is not None and acceptance.acceptance_length is not None:
        predicted = cost.speedup(acceptance.acceptance_length)
    return Run(
        max_draft_len=length,
        text_identical=(not different and bool(answers)) if same_text else None,
        mismatches=mismatches,
        exact_ties=len(mismatches) - len(different),
        differences=len(different),
        near_ties=sum(m.near_tie for m in different),
        speculative=speed,
        speedup=speed.tokens_per_second / max(base.tokens_per_second, 1e-9),
        predicted_speedup=predicted,
        costs=cost,
        acceptance=acceptance,
        acceptance_by_category=by_category(drafted, categories, seed),
        acceptance_by_prompt_length=by_category(drafted, groups, seed),
        acceptance_by_context_length=by_context(drafted, [a.prompt_tokens for a in answers], context_group, seed),
        acceptance_distribution=_distribution(drafted),
    )


def longest_text(answers: Iterable[Answer]) -> int:
    """Tokens of the longest prompt plus answer; 0 without answers."""
    return max((a.prompt_tokens + len(a.base.tokens) for a in answers), default=0)


def build_report(
    parts: Sequence[Part], draft_lens: Sequence[int], costs: Sequence[StepCosts | None], config: DecodeConfig,
    about: dict[str, Any], same_text: bool, memory: Memory, order: Sequence[str],
) -> Report:  # fmt: skip
    """Build the report from the parts of all data-parallel ranks.

    Args:
        order: identifiers of the prompts; intervals resample answers by their place, whatever rank gave them.
        same_text: the text with the draft should be the base's own.
    """
    place = {identifier: i for i, identifier in enumerate(order)}
    answers = sorted((a for part in parts for a in part.answers), key=lambda a: (place[a.identifier], a.round))
    base = _speed([a.base for a in answers], max(part.seconds[0] for part in parts))
    runs = [
        _run(answers, i, length, max(part.seconds[i + 1] for part in parts), base, costs[i], config.seed, same_text)
        for i, length in enumerate(draft_lens)
    ]
    return Report(
        answers=len(answers),
        truncated=sum(not a.base.stopped for a in answers),
        skipped=tuple(sorted(s for part in parts for s in part.skipped)),
        base=base,
        memory=memory,
        runs=tuple(runs),
        decode=config.to_dict(),
        about=about,
    )
