"""Validation of a draft: is the text unchanged, how much faster is decoding, how many draft tokens are accepted?

The base alone answers first; its answers are the history of later rounds in all runs. In exact arithmetic the texts
are equal. With rounding, a verification of several rows and a step of one row may differ in the last bits, so texts
may diverge where the two largest logits are nearly equal: such answers are listed as near ties and count as different.
Where both tokens have the largest logit (common in bfloat16), either is a correct greedy choice: such exact ties are
listed but do not count as different. In a fake-quantised base the last bit of an input between two fp8 codes can
change it by 6 %, so its text is compared in float64, where that hardly ever happens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_spec.base.model import FrozenBase
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.decoding.costs import Costs, now
from megatron_spec.decoding.drafters import build_drafter
from megatron_spec.decoding.engine import decode, two_best
from megatron_spec.decoding.replay import timed_recorder_for
from megatron_spec.decoding.session import DecodeSession, weight_bytes
from megatron_spec.decoding.started import Generation
from megatron_spec.decoding.waiting import groups
from megatron_spec.evaluation.journal import Journal
from megatron_spec.evaluation.report import (
    Answer,
    Memory,
    Mismatch,
    Part,
    Report,
    StepCosts,
    build_report,
    longest_text,
)
from megatron_spec.generation.prompts import Dialogue, Prompt, check_stop_ids
from megatron_spec.ops.visibility import KVCache
from megatron_spec.runtime.files import write_json

log = logging.getLogger(__name__)

WINDOW = 4
"""Batches of dialogues in flight at once; a killed run loses no more than these."""


def tie_tolerance(dtype: torch.dtype, top: float) -> float:
    """Gap of logits that rounding may close: 1e-3 in float32, else a few units in the last place of the largest."""
    return 1e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps * max(1.0, abs(top))


def _bytes_per_token(cache: KVCache | None) -> float:
    """Cache bytes per token of one sequence, on this rank."""
    if cache is None:
        return 0.0
    slots = cache.keys.shape[1] * cache.keys.shape[2]
    return sum(t.numel() * t.element_size() for t in (cache.keys, cache.values)) / slots


def _step_costs(undrafted: Costs, drafted: Costs) -> StepCosts:
    return StepCosts(*(c.typical(phase) for c, phase in (
        (undrafted, "base"), (drafted, "draft"), (drafted, "base"), (drafted, "observe")
    )))  # fmt: skip


def _at_end(items: Iterator[int]) -> bool:
    """True when there is no further item; takes the next one."""
    return next(items, None) is None


def check_draft_lens(lens: Sequence[int]) -> None:
    """Raise UserError unless the draft lengths are distinct and at least 1."""
    given = list(lens) if isinstance(lens, (list, tuple)) else []
    if not given or min(given) < 1 or len(set(given)) < len(given):
        raise UserError(f"--max-draft-len: found {given or lens}, expected distinct numbers of at least 1")


def validate(
    base: FrozenBase,
    draft: Any,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    config: DecodeConfig,
    *,
    stop_ids: set[int],
    draft_lens: Sequence[int] | None = None,
    output: Path | str | None = None,
    about: dict[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Answer all prompts with the base alone and with the draft; every rank calls it and gets the report.

    Args:
        draft: a draft model, a second base model, a Drafter, or None when config.decoding_type needs none.
        stop_ids: tokens that end an answer (data.tokenizer.stop_token_ids).
        draft_lens: draft lengths to measure, in one run; default: config.max_draft_len.
        output: file for the report, written by rank 0; a journal beside it keeps finished answers until then.
        about: what is measured, JSON-serialisable. Part of the report; a rerun with another value starts over.
        template_kwargs: see `ChatTemplate`.

    Raises:
        UserError: no prompts, no draft, a draft length of 0, no stop token, or no prompt that could be answered.
    """
    encoder = ChatEncoder(tokenizer, stop_ids, template_kwargs=template_kwargs, vocab_size=base.vocab_size)
    return _Validation(base, draft, prompts, encoder, config, stop_ids, draft_lens, output, about or {}).run()


class _Validation:
    """State of one call of `validate`."""

    def __init__(
        self, base: FrozenBase, draft: Any, prompts: Sequence[Prompt], encoder: ChatEncoder, config: DecodeConfig,
        stop_ids: set[int], draft_lens: Sequence[int] | None, output: Path | str | None, about: dict[str, Any],
    ) -> None:  # fmt: skip
        self.base, self.draft, self.encoder, self.stop_ids, self.about = base, draft, encoder, stop_ids, about
        self.prompts = prompts
        check_draft_lens(lens := (config.max_draft_len,) if draft_lens is None else draft_lens)
        drafted = draft is not None or config.decoding_type is not None
        if not prompts or not drafted:
            raise UserError("validate: expected prompts and a draft")
        check_stop_ids(stop_ids)
        self.config = config.replace(max_draft_len=lens[0])
        self.undrafted = self.config.replace(decoding_type=None)
        self.configs = [config.replace(max_draft_len=length) for length in lens]
        self.drafters = [build_drafter(draft, base, c) for c in self.configs]
        self.recorders = [timed_recorder_for(base, config.cuda_graphs) for _ in self._decoders()]
        self.sessions = [DecodeSession(recorder) for recorder in self.recorders]
        self.same_text = config.lossless and not config.use_rejection_sampling
        self.output = None if output is None else Path(output)
        world = base.world
        asked = [[p.identifier, p.rounds, p.tools, dict(p.template_kwargs)] for p in prompts]
        digest = hashlib.sha256(json.dumps([asked, encoder.template.kwargs]).encode()).hexdigest()
        self.about = {**about, "prompts_digest": digest[:12]}
        meta = {
            "decode": self.config.to_dict(), "draft_lens": tuple(lens), "prompts": digest, "stop_ids": sorted(stop_ids),
            "about": about, "dtype": str(base.dtype), "ranks": [world.size, world.dp_size],
        }  # fmt: skip
        self.journal = Journal(self.output, meta, len(lens), world)
        mine = prompts[world.dp_rank :: world.dp_size]
        size = WINDOW * config.batch_size
        self.windows = [mine[i : i + size] for i in range(0, len(mine), size)]

    def run(self) -> Report:
        """See `validate`."""
        world = self.base.world
        self._warm_up()
        left = self.windows[self.journal.windows :]
        quiet = world.rank != 0 or not log.isEnabledFor(logging.INFO)
        total = sum(len(p.rounds) for window in self.windows for p in window)
        with tqdm(total=total, initial=len(self.journal.part.answers), unit="answer", disable=quiet) as bar:
            for window in left:
                self.journal.add(self._measure([Dialogue(p) for p in window], bar))
        parts = self._gather(self.journal.part)
        self._check_answered(parts)
        costs = self._costs()
        memory = self._memory(longest_text(a for part in parts for a in part.answers))
        lens = [c.max_draft_len for c in self.configs]
        report = build_report(
            parts, lens, costs, self.config, self.about, self.same_text, memory, [p.identifier for p in self.prompts]
        )
        if self.output is not None and world.rank == 0:
            write_json(self.output, report.to_dict())
        if world.size > 1:
            dist.barrier()
        self.journal.remove()
        return report

    def _check_answered(self, parts: list[Part]) -> None:
        """Log which dialogues ended early. Raises UserError when there is no answer, so nothing to compare."""
        skipped = [line for part in parts for line in part.skipped]
        if not any(part.answers for part in parts):
            self.journal.remove()
            raise UserError(f"none of {len(skipped)} prompts could be answered, the first: {skipped[0]}")
        if skipped and self.base.world.rank == 0:
            log.warning(
                "%d dialogues ended before their last question (the report lists them), the first: %s", len(skipped),
                skipped[0],
            )  # fmt: skip

    def _decoders(self) -> list[tuple[DecodeConfig, Any]]:
        return [(self.undrafted, None), *zip(self.configs, self.drafters, strict=True)]

    def _next_prompt(self, dialogue: Dialogue) -> list[int] | None:
        return dialogue.ask(self.encoder, self.base.config.max_position_embeddings)

    def _samples(self, count: int) -> Iterator[list[int]]:
        """Token ids of up to `count` first questions."""
        for prompt in (p for window in self.windows for p in window):
            if count and (ids := self._next_prompt(Dialogue(prompt))) is not None:
                count -= 1
                yield ids

    def _warm_up(self) -> None:
        """Generate one short answer with each drafter: first calls pay for allocation and kernel compilation."""
        for ids in self._samples(1):
            for config, drafter in self._decoders():
                short = config.replace(max_new_tokens=max(c.max_draft_len for c in self.configs) + 2)
                decode(self.base, [ids], short, set(), draft=drafter)

    def _measure(self, dialogues: list[Dialogue], bar: Any) -> Part:
        part = Part([], [0.0] * (len(self.configs) + 1), [])
        while pending := [(d, ids) for d in dialogues if d.waits and (ids := self._next_prompt(d)) is not None]:
            questions, seeds = [ids for _, ids in pending], [d.seed(self.config.seed) for d, _ in pending]
            results: list[list[Generation]] = []
            for i, (config, drafter) in enumerate(self._decoders()):
                recorder, session, start = self.recorders[i], self.sessions[i], now()
                before = recorder.seconds if recorder else 0.0
                results.append(
                    decode(self.base, questions, config, self.stop_ids, draft=drafter, seeds=seeds, session=session)
                )
                part.seconds[i] += now() - start - (recorder.seconds - before if recorder else 0.0)
            for (d, ids), base, *drafted in zip(pending, *results, strict=True):
                prompt, round_ = d.prompt, len(d.answers)
                mismatches = [self._compare(prompt, round_, ids, base, g) for g in drafted]
                part.answers.append(
                    Answer(prompt.identifier, prompt.category, round_, len(ids), base, drafted, mismatches)
                )
                d.take(base.tokens, base.stopped, self.encoder.tokenizer)
                bar.update()
        part.skipped += [f"{d.prompt.identifier}: {d.problem}" for d in dialogues if d.problem]
        return part

    def _compare(
        self, prompt: Prompt, round_: int, ids: list[int], base: Generation, drafted: Generation
    ) -> Mismatch | None:
        """Collective over the model-parallel ranks, which all have the same answers."""
        a, b = base.tokens, drafted.tokens
        if a == b or not self.same_text:
            return None
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        values, best = two_best(self.base, [*ids, *a[:at]])
        differing = {a[at] if at < len(a) else None, b[at] if at < len(b) else None}
        gap = values[0] - values[1]
        return Mismatch(
            identifier=prompt.identifier,
            round=round_,
            position=at,
            base_token=a[at] if at < len(a) else None,
            speculative_token=b[at] if at < len(b) else None,
            top_gap=gap,
            near_tie=gap <= tie_tolerance(self.base.dtype, values[0]),
            exact_tie=gap == 0 and differing == set(best) and self.config.temperature == 0,
        )

    def _costs(self) -> list[StepCosts | None]:
        """Costs of a step of `batch_size` sequences for each draft length, timed by phase. Without a draft there is one
        cost for all lengths."""
        some = list(self._samples(self.config.batch_size))
        if not some:  # there are fewer questions than data-parallel ranks
            return [None] * len(self.configs)
        group = max(groups(some), key=len)  # those that decode together
        ids = [some[group[i % len(group)]] for i in range(len(some))]
        undrafted = self._timed(ids, self.undrafted, None, 0)
        found: list[StepCosts | None] = []
        for config, drafter in zip(self.configs, self.drafters, strict=True):
            drafted = self._timed(ids, config, drafter, config.max_draft_len)
            measured = "base" in undrafted.seconds and "base" in drafted.seconds
            found.append(_step_costs(undrafted, drafted) if measured else None)
        return found

    def _timed(self, ids: list[list[int]], config: DecodeConfig, drafter: Any, length: int) -> Costs:
        """The phases of steps of all the sequences. The batch stays whole: no answer ends in so few steps, even if all
        tokens are accepted. On a GPU a first pass compiles kernels and records CUDA graphs."""
        cuda = self.base.world.device.type == "cuda"
        steps, session = 16 if cuda else 4, DecodeSession()
        config = config.replace(max_new_tokens=steps * (length + 1) + 1)
        for _ in range(1 + cuda):
            calls, costs = iter(range(steps + 1)), Costs()  # the first call of `stop` is before the prefill
            stop = functools.partial(_at_end, calls)
            decode(self.base, ids, config, set(), draft=drafter, costs=costs, session=session, stop=stop)
        return costs

    def _memory(self, tokens: int) -> Memory:
        """Memory of the run; caches are sized for a batch of the longest measured text. Collective."""
        model = self.draft if isinstance(self.draft, torch.nn.Module) else None
        caches = [self.base.new_cache(1, 1), getattr(self.drafters[0], "cache", None)]
        texts = self.config.batch_size * tokens
        held = [weight_bytes(self.base), weight_bytes(model), *(texts * _bytes_per_token(c) for c in caches)]
        world = self.base.world
        held_2F = torch.tensor([held, [x > 0 for x in held]], dtype=torch.float64, device=world.device)
        if world.size > 1:  # a rank without questions has no cache of the draft
            dist.all_reduce(held_2F)
        ranks, sums, holders = world.size // world.dp_size, *held_2F.tolist()
        base, draft, base_cache, draft_cache = (
            round(x / max(n, 1) * ranks) for x, n in zip(sums, holders, strict=True)
        )  # fmt: skip
        return Memory(base, draft, base_cache, draft_cache, self.config.batch_size, tokens)

    def _gather(self, part: Part) -> list[Part]:
        """The parts of all data-parallel ranks, in order."""
        world = self.base.world
        if world.dp_size == 1:
            return [part]
        parts: list[Any] = [None] * world.dp_size
        dist.all_gather_object(parts, part, group=world.dp)
        return parts
