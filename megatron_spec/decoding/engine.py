"""Decoding with the frozen base: plain, or speculative with a drafter. One loop serves both.

In every step the base reads, for each running sequence, its last known token and the drafted ones, a chain or a tree
(none without a drafter). The verified ones (verify.py) and one token of the base's own are added. At temperature 0 the
text is the base's greedy text. At a higher temperature it has the base's distribution, and unless rejection sampling is
asked for, it is even the text that the base alone draws from the same numbers.

Sequences of different lengths run side by side: caches are addressed by slot, so rejected tokens need no clean-up: they
are never visible and soon overwritten. Nodes of a tree have the slots after the text, and the accepted path closes up.
Running sequences occupy the first rows of every cache; when one ends, the last running row replaces it, and waiting
prompts are prefilled into the free rows after the running ones.

This file holds the host's half: which prompt runs in which row, how much is drafted, what each answer is. The device's
half (step.py, rows.py) depends on nothing that the host knows, so on one GPU a step runs from CUDA graphs (replay.py);
there is one device synchronisation a step, for a table of what was emitted. Rows after the running ones may then be
computed too; they stay inside their cache, and what they hold is overwritten before it is seen.

A base with longrope reads short and long texts with other frequencies (ops/rope.py): a sequence that grows past the
boundary ends there for its row, and waits to be read again as a longer prompt.

Data-parallel ranks know nothing of each other. B rows, S rows of one forward, N draft nodes, P rows of an
accepted path, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.cache import move_rows
from megatron_spec.decoding.costs import Costs, NoCosts
from megatron_spec.decoding.drafters import Drafter, Observation, build_drafter
from megatron_spec.decoding.drafters.lookup import SuffixAutomaton, replaced
from megatron_spec.decoding.replay import Recorder, Replays, key_step, mapped, padded_rows, recorder_for
from megatron_spec.decoding.rows import Outcome, Rows, read_outcomes
from megatron_spec.decoding.step import DeviceSteps
from megatron_spec.decoding.verify import Drafted
from megatron_spec.ops.visibility import Visibility

PREFILL_TOKENS = 16384
"""Most prompt tokens (padding included) that one prefill forward reads: bounds its memory."""

SHORT_PROMPT = 256
"""Prompts up to this many tokens share one cache with each other."""


@dataclass
class Generation:
    """What came of one prompt.

    Attributes:
        tokens: the answer, the stop token included when there is one.
        stopped: True when it ended with a stop token, False when it was cut by max_new_tokens or the context limit.
        num_base_forwards: base forwards this sequence took part in, the prefill included.
        accepted_lengths: per verification step, the tokens emitted less one. A draft token that ends the text counts
            as the base's own token (which would have been the same), so that always
            len(tokens) == 1 + sum(accepted_lengths) + len(accepted_lengths). Empty without a drafter.
        drafted_lengths: per verification step, the draft tokens of a path that could have counted (the depth of a
            tree): those after a token that ends the text are as if never proposed.
        drafted_steps: verification steps in which anything was proposed.
        accepted_after_end: draft tokens accepted after the token that ends the text. Engines count them, too.
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    num_base_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_lengths: list[int] = field(default_factory=list)
    drafted_steps: int = 0
    accepted_after_end: int = 0

    def add(self, outcome: Outcome, verified: bool) -> None:
        """Take in what a step did.

        Args:
            verified: the step verified drafts.
        """
        emitted = outcome.emitted
        self.tokens += outcome.tokens[:emitted]
        self.stopped = bool(outcome.stopped)
        self.num_base_forwards += 1
        if verified:
            self.accepted_lengths.append(emitted - 1)
            self.drafted_lengths.append(emitted - 1 if outcome.stopped else outcome.proposed)
            self.drafted_steps += outcome.proposed > 0
            self.accepted_after_end += max(0, outcome.accepted - (emitted - 1))


def decode(
    base: FrozenBase,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    stop_ids: Iterable[int],
    draft: Any = None,
    progress: Callable[[int, int], None] | None = None,
    seeds: Sequence[int] | None = None,
    costs: Costs | None = None,
    recorder: Recorder | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Generation]:
    """Answer every prompt; results in the order of the prompts. Collective over the model parallel ranks.

    Args:
        prompts: token ids, not empty, shorter than the base's max_position_embeddings.
        stop_ids: tokens that end an answer.
        draft: a draft model, a second base model or a Drafter; None drafts by config.decoding_type, or not at all.
        progress: called with (answers done, answers in all) for every answer.
        seeds: one per prompt for temperature > 0; config.seed + the prompt's index otherwise.
        costs: where the time of each phase is kept.
        recorder: of CUDA graphs; default: where they pay, unless config.cuda_graphs is off.
        stop: asked before every step; True, on all model parallel ranks alike, ends it with the answers that are ready.

    Raises:
        UserError: an empty or too long prompt, or a base under sequence parallelism.
    """
    answers: dict[int, Generation] = {}
    for index, generation in decode_stream(base, prompts, config, stop_ids, draft, seeds, costs, recorder, stop):
        answers[index] = generation
        if progress:
            progress(len(answers), len(prompts))
    return [answers[i] for i in sorted(answers)]


@torch.inference_mode()
def decode_stream(
    base: FrozenBase,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    stop_ids: Iterable[int],
    draft: Any = None,
    seeds: Sequence[int] | None = None,
    costs: Costs | None = None,
    recorder: Recorder | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """`decode`, yielding (index of the prompt, answer) as answers end."""
    _check(base, prompts)
    drafter, stop_ids = build_drafter(draft, base, config), set(stop_ids)
    seeds = seeds if seeds is not None else [config.seed + i for i in range(len(prompts))]
    if recorder is None and config.cuda_graphs:
        recorder = recorder_for(base)
    for group in _groups(prompts):
        replays = Replays(recorder)
        engine = _Engine(base, prompts, group, config, stop_ids, drafter, seeds, costs or NoCosts(), replays)
        yield from engine.run(stop or (lambda: False))


def _groups(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices, longest prompts first, cut where prompts are less than half as long: caches are sized by the longest."""
    group: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        if group and 2 * max(len(prompts[i]), SHORT_PROMPT) < len(prompts[group[0]]):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _check(base: FrozenBase, prompts: Sequence[Sequence[int]]) -> None:
    if base.world.parallel.sequence_parallel:
        raise UserError("decoding: found sequence parallelism, which one token cannot use: drop --sequence-parallel")
    limit = base.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise UserError(
                f"decoding: prompt {i} has {len(prompt)} tokens, expected 1 to {limit - 1} (the base's "
                f"max_position_embeddings is {limit}): leave it out or shorten it"
            )


@torch.inference_mode()
def two_best(base: FrozenBase, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Values and ids of the two largest logits that follow `tokens`, read in one forward without a cache.

    Collective over the model parallel ranks.
    """
    tokens_BS = torch.tensor([list(tokens)], dtype=torch.int64, device=base.world.device)
    slots_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
    zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
    batch = Batch(tokens_BS, slots_BS, zeros_BS, zeros_BS)
    _, state_SBH = run_base_everywhere(base, batch, Visibility.causal())
    values, ids = sampling.topk(base.logits(state_SBH[-1:])[0], 2, base.world.tp)
    return values[0].tolist(), ids[0].tolist()


@dataclass
class _Sequence:
    """A running sequence as the host knows it.

    Attributes:
        index: of the prompt.
        generation: the answer so far.
        length, limit: known tokens, and most tokens in this row.
        automaton: of the text, where a lookup proposes in addition to the draft.
    """

    index: int
    generation: Generation
    length: int
    limit: int
    automaton: SuffixAutomaton | None = None


class _Engine:
    """The host's half of one call of `decode`: rows 0..running-1 of every tensor are in use."""

    def __init__(
        self, base: FrozenBase, prompts: Sequence[Sequence[int]], group: list[int], config: DecodeConfig,
        stop_ids: set[int], drafter: Drafter | None, seeds: Sequence[int], costs: Costs, replays: Replays,
    ) -> None:  # fmt: skip
        self.base, self.prompts, self.config, self.drafter, self.seeds = base, prompts, config, drafter, seeds
        self.costs, self.replays = costs, replays
        self.waiting = group  # longest first: neighbours in a batch have similar lengths
        self.running: list[_Sequence] = []  # one for each row in use
        self.begun: dict[int, Generation] = {}  # answers that wait to be read again
        self.ended: list[tuple[int, Generation]] = []
        self.draft_len = config.max_draft_len if drafter else 0
        self.count = count = min(config.batch_size, len(group))
        self.nodes = max(drafter.max_nodes(self.draft_len), self.draft_len) if drafter else 0
        longest = max(self._limit(i) for i in group) + self.nodes + 1
        self.key_step = key_step(longest)
        longest = self._key_slots(longest)
        self.cache = base.new_cache(count, longest)
        if drafter:
            drafter.open(count, longest)
        self.rows = Rows(count, longest + 1, config, stop_ids, base.world.device)
        self.device = DeviceSteps(base, config, self.rows, self.cache, drafter)

    def _limit(self, i: int) -> int:
        return min(len(self.prompts[i]) + self.config.max_new_tokens, self.base.config.max_position_embeddings)

    def _text(self, i: int) -> list[int]:
        """Prompt i and the answer so far."""
        return [*self.prompts[i], *(self.begun[i].tokens if i in self.begun else ())]

    def _row_limit(self, i: int) -> int:
        """Most tokens of prompt i and its answer that a row can hold before it is read again."""
        short = self.base.config.rope.longest_short
        return self._limit(i) if short is None or len(self._text(i)) > short else min(self._limit(i), short + 1)

    def _key_slots(self, needed: int) -> int:
        return -(-needed // self.key_step) * self.key_step

    def run(self, stop: Callable[[], bool]) -> Iterator[tuple[int, Generation]]:
        """Yield answers as they end."""
        while (self.running or self.waiting) and not stop():
            free = self.count - len(self.running)
            # A prefill of few prompts costs nearly as much as a step: wait for a quarter of the rows.
            if self.waiting and (not self.running or free * 4 >= self.count):
                self._prefill(free)
            else:
                self._verify()
            yield from self.ended
            self.ended = []

    def _prefill(self, free: int) -> None:
        """Read waiting prompts into the free rows and emit their first tokens."""
        widest = len(self._text(self.waiting[0]))
        count = max(1, min(free, PREFILL_TOKENS // widest, len(self.waiting)))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        first, texts, limits = len(self.running), [self._text(i) for i in taken], [self._row_limit(i) for i in taken]
        prompts = [len(self.prompts[i]) for i in taken]
        self.rows.place(first, texts, prompts, limits, [self.seeds[i] for i in taken])
        with self.costs.phase("prefill"):
            step = self.device.prefill(first, count, widest)
        if self.drafter:
            self.drafter.observe(step.seen)
        for i, text, limit in zip(taken, texts, limits, strict=True):
            automaton = self._automaton(i)
            generation = self.begun.pop(i) if i in self.begun else Generation()
            self.running.append(_Sequence(i, generation, len(text), limit, automaton))
        self._book(first, read_outcomes(step.table_BX, count), verified=False)

    def _automaton(self, i: int) -> SuffixAutomaton | None:
        beside = self.drafter is not None and self.config.sa_threshold is not None
        return SuffixAutomaton(self._text(i)) if beside else None

    def _looked_up(self, drafted: Drafted) -> Drafted:
        """What followed a match replaces the draft's tokens where the match is long enough."""
        count, threshold = drafted.tokens_BN.shape[1], self.config.sa_threshold or 0
        found = [
            s.automaton.propose(min(count, s.limit - s.length - 1), threshold=threshold) if s.automaton else []
            for s in self.running
        ]
        return replaced(drafted, found) if any(found) else drafted

    def _draft(self, batch: int) -> Drafted:
        """What is proposed for rows 0 .. batch - 1."""
        count = min(self.draft_len, max(s.limit - s.length for s in self.running) - 1)
        if self.replays.active:
            count = self.draft_len  # one shape; nodes that no sequence may still grow do not count
        if count == 0 or self.drafter is None:
            nothing_BN = self.rows.tokens_BL.new_empty(batch, 0)
            return Drafted(nothing_BN, nothing_BN.bool(), None, 0)
        lengths = [s.length for s in self.running]
        key_slots = self._key_slots(max(lengths) + self.nodes)
        if self.drafter.fixed_shapes:
            name = ("draft", batch, count, key_slots)
            return self.replays.run(name, lambda: self.device.propose(batch, count, key_slots, lengths))
        running = len(self.running)
        drafted = self.device.propose(running, count, key_slots, lengths)
        if running == batch:
            return drafted
        rows_B = torch.arange(batch, device=self.rows.tokens_BL.device).clamp(max=running - 1)
        filled: Drafted = mapped(drafted, lambda tensor: tensor[rows_B])
        return filled

    def _verify(self) -> None:
        """One step of every running sequence. Only reading the table synchronises with the device."""
        running = len(self.running)
        batch = padded_rows(running, self.count) if self.replays.active else running
        with self.costs.phase("draft"):
            drafted = self._draft(batch)
            if self.config.sa_threshold is not None:
                drafted = self._looked_up(drafted)
        key_slots = self._key_slots(max(s.length for s in self.running) + drafted.tokens_BN.shape[1])
        name = ("base", batch, key_slots, drafted.depth)
        with self.costs.phase("base"):
            step = self.replays.run(name, lambda given: self.device.judged(batch, key_slots, given), drafted)
            outcomes = read_outcomes(step.table_BX, running)
        if self.drafter:
            with self.costs.phase("observe"):
                self._observe(step.seen, 1 + max(outcome.accepted for outcome in outcomes))
        self._book(0, outcomes, verified=self.drafter is not None)

    def _observe(self, seen: Observation, longest: int) -> None:
        """Args: longest: most rows of a sequence that are final."""
        assert self.drafter is not None
        if self.drafter.fixed_shapes and self.replays.active:
            self.replays.run(("observe", seen.key_slots), self.drafter.observe, seen)
            return
        B, P = len(self.running), longest
        self.drafter.observe(Observation(
            0, seen.slots_BS[:B, :P], seen.next_tokens_BS[:B, :P], seen.counts_B[:B], seen.captures_SBC[:P, :B],
            seen.state_SBH[:P, :B], seen.key_slots,
        ))  # fmt: skip

    def _book(self, first: int, outcomes: list[Outcome], verified: bool) -> None:
        """Add the emitted tokens of rows `first`.. to their answers and free the ended rows."""
        for sequence, outcome in zip(self.running[first:], outcomes, strict=True):
            sequence.length += outcome.emitted
            again = self.drafter is not None and bool(sequence.generation.tokens)  # read again: a step without drafts
            sequence.generation.add(outcome, verified or again)
            if sequence.automaton is not None:
                sequence.automaton.extend(outcome.tokens[: outcome.emitted])
        ended = [row for row, outcome in enumerate(outcomes, start=first) if outcome.over]
        if ended:
            self._free(ended)

    def _free(self, ended: list[int]) -> None:
        """Move the last running rows over the ended ones."""
        for sequence in (self.running[row] for row in ended):
            if sequence.generation.stopped or sequence.length >= self._limit(sequence.index):
                self.ended.append((sequence.index, sequence.generation))
            else:  # it crossed longrope's boundary
                self.begun[sequence.index] = sequence.generation
                self.waiting.append(sequence.index)
                self.waiting.sort(key=lambda i: -len(self._text(i)))
        left, gone = len(self.running) - len(ended), set(ended)
        target = [r for r in ended if r < left]
        source = [r for r in range(left, len(self.running)) if r not in gone]
        if source:
            move_rows(self.cache, source, target)
            self.rows.move(source, target)
            if self.drafter:
                self.drafter.move_rows(source, target)
        for s, t in zip(source, target, strict=True):
            self.running[t] = self.running[s]
        del self.running[left:]
