"""Is the text with a draft the text without, how much sooner is it there, and how much of the draft is accepted?

The base alone answers first; its answers are the history of later rounds in both runs. In exact arithmetic both texts
are equal. With rounding, a verification of several rows and a step of one row may differ in the last bits, so a text
may part where the two largest logits are as good as equal: such places are listed as near ties, and still count as
not identical. A fake-quantised base makes the last bit of an input that lies between two fp8 codes a step of 6 %, so
its text is compared in float64, where that hardly ever happens.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.decoding.acceptance import AcceptanceStats, acceptance_stats, by_category
from megatron_spec.decoding.drafters import build_drafter
from megatron_spec.decoding.engine import Generation, decode, two_best
from megatron_spec.decoding.prompts import Dialogue, Prompt, check_stop_ids
from megatron_spec.files import write_json
from megatron_spec.pipeline.model import FrozenBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mismatch:
    """An answer that came out differently with the draft.

    Attributes:
        identifier: of the prompt.
        round: 0 for the first question.
        position: index in the answer of the first token that differs.
        base_token: there, of the base alone; None when its answer ended before.
        speculative_token: there, with the draft.
        top_gap: difference of the two largest logits of the base after the common text.
        near_tie: the gap is within what rounding can do (see `tie_tolerance`).
    """

    identifier: str
    round: int
    position: int
    base_token: int | None
    speculative_token: int | None
    top_gap: float
    near_tie: bool


@dataclass(frozen=True)
class Speed:
    """Tokens of the answers over wall-clock seconds, prefill included; of all data-parallel ranks together.

    `seconds` are the slowest data-parallel rank's.
    """

    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Report:
    """Content of validate.json.

    Attributes:
        text_identical: every answer is equal token for token.
        answers: answers compared.
        truncated: answers of the base that met no stop token.
        skipped: prompts (or later rounds) that were not asked, and why.
        mismatches: every answer that differs.
        near_ties: mismatches that rounding explains.
        base, speculative: speed without and with the draft.
        speedup: ratio of the speeds.
        acceptance: over all answers.
        acceptance_by_category: the same per category of the prompts.
        decode: the configuration.
    """

    text_identical: bool
    answers: int
    truncated: int
    skipped: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]
    near_ties: int
    base: Speed
    speculative: Speed
    speedup: float
    acceptance: AcceptanceStats
    acceptance_by_category: dict[str, AcceptanceStats]
    decode: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Ready for json; the figures most readers want stand at the top."""
        found = self.acceptance
        top = {
            "acceptance_length": found.acceptance_length,
            "ci95": found.acceptance_length_ci95,
            "acceptance_per_position": found.acceptance_per_position,
        }
        return {**top, **dataclasses.asdict(self)}


@dataclass
class _Case:
    """One answer, with and without the draft."""

    prompt: Prompt
    round: int
    ids: list[int]
    alone: Generation
    speculative: Generation
    mismatch: Mismatch | None = None


def tie_tolerance(dtype: torch.dtype, top: float) -> float:
    """Gap of logits that rounding may close: 1e-3 in float32, else a few units in the last place of the largest."""
    return 1e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps * max(1.0, abs(top))


def validate(
    base: FrozenBase,
    draft: Any,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    config: DecodeConfig,
    *,
    stop_ids: set[int],
    output: Path | str | None = None,
) -> Report:
    """Answer all prompts with the base alone and with the draft; every rank calls it and gets the report.

    Args:
        draft: a draft model or a Drafter.
        stop_ids: tokens that end an answer (data.tokenizer.stop_token_ids).
        output: file for the report, written by rank 0.

    Raises:
        UserError: no prompts, no draft, max_draft_len 0, or no stop token.
    """
    if not prompts or draft is None or config.max_draft_len == 0:
        raise UserError("validate: expected prompts, a draft and --max-draft-len of at least 1")
    check_stop_ids(stop_ids)
    drafter, world = build_drafter(draft, base), base.world
    cases: list[_Case] = []
    dialogues = [Dialogue(p) for p in prompts[world.dp_rank :: world.dp_size]]
    encoder, seconds = ChatEncoder(tokenizer), [0.0, 0.0]
    _warm_up(base, drafter, dialogues, encoder, config)
    while asking := [(d, ids) for d in dialogues if d.waits and (ids := _ask(d, encoder, base)) is not None]:
        questions, seeds = [ids for _, ids in asking], [d.seed(config.seed) for d, _ in asking]
        results = []
        for way, with_draft in enumerate((None, drafter)):
            start = _now()
            results.append(decode(base, questions, config, stop_ids, draft=with_draft, seeds=seeds))
            seconds[way] += _now() - start
        for (d, i), alone, speculative in zip(asking, *results, strict=True):
            cases.append(_Case(d.prompt, len(d.answers), i, alone, speculative))
            d.take(alone.tokens, alone.stopped, tokenizer)
    for case in cases:
        case.mismatch = _compare(base, case)
    skipped = [f"{d.prompt.identifier}: {d.problem}" for d in dialogues if d.problem]
    parts = _gather((cases, seconds, skipped), base)
    report = _report(parts, config)
    if output is not None and world.rank == 0:
        write_json(output, report.to_dict())
    return report


def _ask(dialogue: Dialogue, encoder: ChatEncoder, base: FrozenBase) -> list[int] | None:
    return dialogue.ask(encoder, base.config.max_position_embeddings)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _warm_up(
    base: FrozenBase, drafter: Any, dialogues: list[Dialogue], encoder: ChatEncoder, config: DecodeConfig
) -> None:
    """One short answer in each way: first calls pay for memory and kernels that later ones do not."""
    first = next((ids for d in dialogues if (ids := _ask(Dialogue(d.prompt), encoder, base))), None)
    if first:
        short = config.replace(max_new_tokens=config.max_draft_len + 2)
        for way in (None, drafter):
            decode(base, [first], short, set(), draft=way)


def _compare(base: FrozenBase, case: _Case) -> Mismatch | None:
    """Collective over the model parallel ranks, which all hold the same case."""
    a, b = case.alone.tokens, case.speculative.tokens
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    values = two_best(base, [*case.ids, *a[:at]])[0]
    gap = values[0] - values[1]
    return Mismatch(
        identifier=case.prompt.identifier,
        round=case.round,
        position=at,
        base_token=a[at] if at < len(a) else None,
        speculative_token=b[at] if at < len(b) else None,
        top_gap=gap,
        near_tie=gap <= tie_tolerance(base.dtype, values[0]),
    )


_Part = tuple[list[_Case], list[float], list[str]]


def _gather(part: _Part, base: FrozenBase) -> list[_Part]:
    """The parts of all data-parallel ranks, in order."""
    if base.world.dp_size == 1:
        return [part]
    parts: list[Any] = [None] * base.world.dp_size
    dist.all_gather_object(parts, part, group=base.world.dp)
    return parts


def _speed(generations: Sequence[Generation], seconds: float) -> Speed:
    tokens = sum(len(g.tokens) for g in generations)
    return Speed(tokens, seconds, tokens / max(seconds, 1e-9))


def _report(parts: Sequence[_Part], config: DecodeConfig) -> Report:
    cases = [c for part in parts for c in part[0]]
    mismatches = [c.mismatch for c in cases if c.mismatch is not None]
    spoken = [c.speculative for c in cases]
    alone = _speed([c.alone for c in cases], max(part[1][0] for part in parts))
    speculative = _speed(spoken, max(part[1][1] for part in parts))
    return Report(
        text_identical=not mismatches and bool(cases),
        answers=len(cases),
        truncated=sum(not c.alone.stopped for c in cases),
        skipped=tuple(s for part in parts for s in part[2]),
        mismatches=tuple(mismatches),
        near_ties=sum(m.near_tie for m in mismatches),
        base=alone,
        speculative=speculative,
        speedup=speculative.tokens_per_second / max(alone.tokens_per_second, 1e-9),
        acceptance=acceptance_stats(spoken, config.seed),
        acceptance_by_category=by_category(spoken, [c.prompt.category for c in cases], config.seed),
        decode=config.to_dict(),
    )
