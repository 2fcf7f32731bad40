"""Decoding with the frozen base, plain or speculative. One loop serves both.

In each step the base reads, for every running sequence, the last known token and the proposal (a chain, a tree, or
nothing without a drafter) and emits the accepted path and the bonus token (verify.py). With lossless acceptance, the
text at temperature 0 is the base's greedy text; at higher temperatures it follows the base's distribution and, without
rejection sampling, is the very text that the base alone samples from the same random numbers.

Sequences of different lengths run side by side. Caches are addressed by slot: rejected tokens are never visible and
soon overwritten, so they need no clean-up. Tree nodes take the slots after the text, and the accepted path is compacted
to the first of them. Running sequences occupy the first rows of every cache; when one finishes, the last running row
replaces it, and waiting prompts are prefilled into the free rows after the running ones.

This file is the host side: which prompt runs in which row, how much is drafted, the answers. The device side (step.py,
rows.py) depends on nothing that the host knows, so on one GPU a step replays CUDA graphs (replay.py). Replayed steps
may compute rows after the running ones, as padding; these write only to their own cache rows, and what they write is
overwritten before it is visible.

One wait per step reads the table of emitted tokens. Before it, while the device computes the step, the host records
what the previous step emitted and hands out the answers that ended in it. Where nothing that the host reads decides
what the device does next (no drafter that reads values), proposal, verification and observation are one
graph, and a step starts before the previous one is read: the device never waits for the host. A sequence that has ended
by then runs one step too many, of which nothing is kept (started.py).

A base with longrope has different frequencies for short and long texts (ops/rope.py): a sequence that grows past the
boundary leaves its row and is prefilled again as a longer prompt.

Data-parallel ranks decode independently. B rows, S rows of one forward, N draft nodes, P rows of an accepted path,
H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.direct import reads_by_sequence
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.cache import Moves
from megatron_spec.decoding.costs import Costs, NoCosts
from megatron_spec.decoding.drafters import Observation
from megatron_spec.decoding.replay import key_step, mapped, padded_rows
from megatron_spec.decoding.rows import NUMBERS, Outcomes, read_outcomes
from megatron_spec.decoding.session import DecodeSession, weight_bytes
from megatron_spec.decoding.started import Generation, Sequenced, Started
from megatron_spec.decoding.step import Common
from megatron_spec.decoding.verify import Drafted
from megatron_spec.decoding.waiting import Waiting, check_lengths, groups
from megatron_spec.ops.visibility import Visibility
from megatron_spec.runtime import platform
from megatron_spec.runtime.platform import to_host

REFILL, REFILL_ALIKE = 1 / 4, 1 / 16
"""Share of the rows that is free before waiting prompts are read: few of them cost nearly as much as a step. Where all
are the same, nothing has to be read again."""
MIXED = 1 / 4
"""Largest part of the memory beside the base's weights for a cache whose rows are all as long as the longest of unlike
prompts."""


def decode(
    base: FrozenBase,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    stop_ids: Iterable[int],
    draft: Any = None,
    progress: Callable[[int, int], None] | None = None,
    seeds: Sequence[int] | None = None,
    costs: Costs | None = None,
    session: DecodeSession | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Generation]:
    """Answer every prompt; results in the order of the prompts. Collective over the model parallel ranks.

    Args:
        prompts: token ids, not empty, shorter than the base's max_position_embeddings.
        stop_ids: tokens that end an answer.
        draft: a draft model, a second base model or a Drafter; None: the drafter of config.decoding_type, if any.
        progress: called with (finished answers, all answers) after every answer.
        seeds: one per prompt, for temperature > 0; default: config.seed + the prompt's index.
        costs: collects the time of each phase.
        session: keeps caches and CUDA graphs for other calls that are given it.
        stop: called before every step; True, on all model parallel ranks alike, ends decoding; finished answers count.

    Raises:
        UserError: an empty or too long prompt, or a base under sequence parallelism.
    """
    answers: dict[int, Generation] = {}
    for ended in decode_batches(base, prompts, config, stop_ids, draft, seeds, costs, session, stop):
        for index, generation in ended:
            answers[index] = generation
            if progress:
                progress(len(answers), len(prompts))
    return [answers[i] for i in sorted(answers)]


@torch.inference_mode()
def decode_batches(
    base: FrozenBase,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    stop_ids: Iterable[int],
    draft: Any = None,
    seeds: Sequence[int] | None = None,
    costs: Costs | None = None,
    session: DecodeSession | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generator[list[tuple[int, Generation]], None, None]:
    """`decode`, yielding together the (index of the prompt, answer) that ended in one step.

    On a GPU the next step is running by then: work on the answers costs no time while it is shorter than a step.
    """
    if base.world.parallel.sequence_parallel:
        raise UserError("decoding: sequence parallelism is not supported: drop --sequence-parallel")
    check_lengths(prompts, base.config.max_position_embeddings)
    seeds = seeds if seeds is not None else [config.seed + i for i in range(len(prompts))]
    with (session or DecodeSession()).call(base, draft, config, set(stop_ids)) as own:
        room = _room(base) if own.drafter is None else 0
        for group in groups(prompts, room, config.batch_size, config.max_new_tokens):
            engine = _Engine(base, prompts, group, config, seeds, costs or NoCosts(), own)
            yield from engine.run(stop or (lambda: False))
            del engine  # the next group may need the memory of its caches


@torch.inference_mode()
def two_best(base: FrozenBase, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Values and ids of the two largest logits after `tokens`, from one forward without a cache.

    Collective over the model parallel ranks.
    """
    tokens_BS = torch.tensor([list(tokens)], dtype=torch.int64, device=base.world.device)
    slots_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
    zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
    batch = Batch(tokens_BS, slots_BS, zeros_BS, zeros_BS)
    _, state_SBH = run_base_everywhere(base, batch, Visibility.causal())
    values, ids = sampling.topk(base.logits(state_SBH[-1:])[0], 2, base.world.tp)
    return values[0].tolist(), ids[0].tolist()


def _extend(sequences: list[Sequenced], outcomes: Outcomes, verified: bool, drafted: bool) -> None:
    """Append what a step emitted to the answers; see `_Engine._update`. Args: drafted: there is a drafter."""
    accepted, emitted, stopped, _, proposed, tokens = (column.tolist() for column in outcomes)
    for sequence, count, line, ends in zip(sequences, emitted, tokens, stopped, strict=True):
        # A repeated prefill counts as a verification without draft tokens.
        if not verified and drafted and sequence.generation.tokens:
            sequence.generation.add_verification(0, 1, ends, 0)
        sequence.generation.add(line[:count], ends)
    if verified:
        for sequence, *numbers in zip(sequences, accepted, emitted, stopped, proposed, strict=True):
            sequence.generation.add_verification(*numbers)


def _filled(drafted: Drafted, running: int, batch: int) -> Drafted:
    """Proposals for `batch` rows: those after the running ones repeat the last of them."""
    rows_B = torch.arange(batch, device=drafted.tokens_BN.device).clamp(max=running - 1)
    filled: Drafted = mapped(drafted, lambda tensor: tensor[rows_B]) if batch > running else drafted
    return filled


def _first_rows(seen: Observation, batch: int, count: int) -> Observation:
    """The first `count` rows of the first `batch` sequences."""
    B, P = batch, count
    return Observation(
        0, seen.slots_BS[:B, :P], seen.next_tokens_BS[:B, :P], seen.counts_B[:B], seen.captures_SBC[:P, :B],
        seen.state_SBH[:P, :B], seen.key_slots,
    )  # fmt: skip


def _room(base: FrozenBase) -> int:
    """Slots of a cache that may hold prompts of any length, 0 where a step costs more with a longer row beside it.

    Collective over the model parallel ranks.
    """
    memory = platform.device_memory() - weight_bytes(base)
    allowed = reads_by_sequence(base.direct) and 0 < memory < math.inf
    room = int(MIXED * memory / base.cache_bytes(1)) if allowed else 0
    room_1 = torch.tensor([room], device=base.world.device)
    for group in (base.world.tp, base.world.pp):
        if group.size() > 1:
            dist.all_reduce(room_1, op=dist.ReduceOp.MIN, group=group)
    return int(room_1)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


class _Engine:
    """Host side of one group of prompts: rows 0..running-1 of every tensor are in use."""

    def __init__(
        self, base: FrozenBase, prompts: Sequence[Sequence[int]], group: list[int], config: DecodeConfig,
        seeds: Sequence[int], costs: Costs, session: DecodeSession,
    ) -> None:  # fmt: skip
        self.base, self.config, self.seeds, self.costs = base, config, seeds, costs
        self.drafter = drafter = session.drafter
        self.waiting = Waiting(prompts, group, config.max_new_tokens, base.config)
        self.once = drafter is None and self.waiting.equal and base.paths.on("common_prompt")
        self.common: Common | None = None  # what was read of the prompt of all sequences
        self.running: list[Sequenced] = []  # one per row in use
        self.finished: list[tuple[int, Generation]] = []  # ended in the last step that was read
        self.unrecorded: tuple[list[Sequenced], Outcomes, bool] | None = None  # what it emitted
        self.draft_len = config.max_draft_len if drafter else 0
        self.count = count = min(config.batch_size, len(group))
        # Known tokens of each row, and their maximum number.
        self.length_B, self.limit_B = np.zeros((2, count), dtype=np.int64)
        self.nodes = max(drafter.max_nodes(self.draft_len), self.draft_len) if drafter else 0
        longest = max(map(self.waiting.limit, group)) + self.nodes + 1
        self.key_step = key_step(longest)
        self.slots = _rounded_up(longest, self.key_step)
        buffers = session.buffers(count, self.slots)
        self.cache, self.rows, self.device = buffers.cache, buffers.rows, buffers.steps
        self.replays = buffers.replays
        # One number of slots to read where it costs nothing; 0: as few as possible.
        self.whole = buffers.slots if drafter is None and reads_by_sequence(base.direct) else 0
        self.started: list[Started] = []  # steps that are not read yet, oldest first
        follows = drafter is None or drafter.fixed_shapes
        self.ahead = int(follows and self.replays.active and not costs.apart)  # steps that stay unread

    def run(self, stop: Callable[[], bool]) -> Iterator[list[tuple[int, Generation]]]:
        """Yield the answers that ended in a step while the device computes the next one."""
        refill, filling = REFILL_ALIKE if self.once else REFILL, False
        while (self.running or self.waiting) and not stop():
            free = self.count - len(self.running)
            enough = filling or not self.running or free >= refill * self.count
            filling = bool(self.waiting) and free > 0 and enough  # once begun, until all rows are in use
            self.started.append(self._prefill(free) if filling else self._cycle() if self.ahead else self._verify())
            yield from self._ended()
            if len(self.started) > self.ahead:
                self._settle(self.started.pop(0))
        yield from self._ended()

    def _ended(self) -> Iterator[list[tuple[int, Generation]]]:
        """The answers that ended in the last step that was read, if any."""
        self._record()
        if self.finished:
            ended, self.finished = self.finished, []
            yield ended

    def _prefill(self, free: int) -> Started:
        """Start the prefill of waiting prompts into the free rows."""
        self._record()  # an answer that continues in another row is part of its text
        waiting, first = self.waiting, len(self.running)
        as_one = self.once and waiting.alike
        taken = waiting.take(free, as_one)
        texts, limits = [waiting.text(i) for i in taken], [waiting.row_limit(i) for i in taken]
        count, widest = len(taken), max(map(len, texts))
        prompts = [len(waiting.prompts[i]) for i in taken]
        self.rows.place(first, texts, prompts, limits, [self.seeds[i] for i in taken])
        table = self._begin(first, count, widest) if as_one else self._read_prompts(first, count, widest)
        self.length_B[first : first + count], self.limit_B[first : first + count] = [len(t) for t in texts], limits
        self.running += [Sequenced(i, waiting.begin(i)) for i in taken]
        return Started(self.running[first:], first, table, 1)

    def _read_prompts(self, first: int, count: int, widest: int) -> Callable[[], Tensor]:
        """Start the prefill of new rows. Returns their table."""
        with self.costs.phase("prefill"):
            step = self.device.prefill(first, count, widest)
        table = to_host(step.table_BX)
        if self.drafter:
            self.drafter.observe(step.seen)
        return table

    def _begin(self, first: int, count: int, widest: int) -> Callable[[], Tensor]:
        """`_read_prompts` of one prompt in all rows, which is read once."""
        with self.costs.phase("prefill"):
            self.common = self.common or self.device.read_common(first, widest)
            table_BX = self.device.begin(first, count, self.common)
        return to_host(table_BX)

    def _unread(self) -> int:
        """Most tokens that a sequence has emitted in steps that were not read yet."""
        return sum(step.most for step in self.started)

    def _reach(self, more: int) -> int:
        """Cache slots that a step may read, with `more` after the known tokens."""
        longest = int(self.length_B[: len(self.running)].max()) + self._unread()
        return self.whole or min(_rounded_up(longest + more, self.key_step), self.slots)

    def _draft(self, batch: int) -> Drafted:
        """Proposals for rows 0 .. batch - 1."""
        # One shape for replays; nodes past a sequence's limit are invalid.
        running, count = len(self.running), self.draft_len
        if not self.replays.active:
            count = min(count, int((self.limit_B[:running] - self.length_B[:running]).max()) - 1)
        if count == 0 or self.drafter is None:
            return self.device.nothing(batch)
        lengths = self.length_B[:running].tolist()
        key_slots = self._reach(self.nodes)
        if self.drafter.fixed_shapes:
            name = ("draft", batch, count, key_slots)
            return self.replays.run(name, lambda: self.device.propose(batch, count, key_slots, lengths))
        return _filled(self.device.propose(running, count, key_slots, lengths), running, batch)

    def _cycle(self) -> Started:
        """Start a step of all running sequences as one replay."""
        running = len(self.running)
        batch, key_slots = padded_rows(running, self.count), self._reach(self.nodes)
        with self.costs.phase("cycle"):
            name = ("cycle", batch, key_slots)
            table_BX = self.replays.run(name, lambda: self.device.cycle(batch, self.draft_len, key_slots))
        most = table_BX.shape[1] - NUMBERS
        return Started(self.running[:], 0, to_host(table_BX[:running]), most, verified=self.drafter is not None)

    def _verify(self) -> Started:
        """Start a step of all running sequences."""
        running = len(self.running)
        batch = padded_rows(running, self.count) if self.replays.active else running
        with self.costs.phase("draft"):
            drafted = self._draft(batch)
        key_slots = self._reach(drafted.tokens_BN.shape[1])
        name = ("base", batch, key_slots, drafted.depth)
        with self.costs.phase("base"):
            step = self.replays.run(name, lambda given: self.device.verify(batch, key_slots, given), drafted)
        table = to_host(step.table_BX[:running])
        started = Started(self.running[:], 0, table, drafted.depth + 1, verified=self.drafter is not None)
        if self.drafter is not None and self.drafter.fixed_shapes and self.replays.active:
            self._observe(step.seen)
        elif self.drafter is not None:
            started.seen = step.seen
        return started

    def _settle(self, step: Started) -> None:
        """Read what a step emitted."""
        with self.costs.phase("read"):
            outcomes = read_outcomes(step.table())
        if step.seen is not None:
            self._observe(step.seen, 1 + int(outcomes.accepted.max()))
        self._update(step, outcomes)

    def _observe(self, seen: Observation, longest: int | None = None) -> None:
        """Args: longest: maximum number of final rows of a sequence; None: observe all of them, in a recording."""
        assert self.drafter is not None
        with self.costs.phase("observe"):
            if longest is None:
                self.replays.run(("observe", seen.key_slots), self.drafter.observe, seen)
            else:
                self.drafter.observe(_first_rows(seen, len(self.running), longest))

    def _update(self, step: Started, outcomes: Outcomes) -> None:
        """Advance the rows of a step and free the finished ones. Their answers are extended later (`_record`)."""
        sequences, rows_B, outcomes = step.alive(outcomes)
        self.length_B[rows_B] += outcomes.emitted
        self.unrecorded = (sequences, outcomes, step.verified)
        if outcomes.finished.any():
            ended = outcomes.finished.nonzero()[0]
            self._free(rows_B[ended].tolist(), outcomes.stopped[ended].tolist())

    def _record(self) -> None:
        """Append what the last step that was read emitted to the answers. It is done while the device computes."""
        if self.unrecorded is None:
            return
        _extend(*self.unrecorded, drafted=self.drafter is not None)
        self.unrecorded = None

    def _free(self, finished: list[int], stopped: list[int]) -> None:
        """Move the last running rows over the finished ones.

        Args:
            stopped: 1 for each of them that ended with a stop token.
        """
        for row, ended in zip(finished, stopped, strict=True):
            sequence = self.running[row]
            if ended or self.length_B[row] >= self.waiting.limit(sequence.index):
                self.finished.append((sequence.index, sequence.generation))
            else:  # it crossed longrope's boundary
                self._record()
                self.waiting.put_back(sequence.index, sequence.generation)
        left, gone = len(self.running) - len(finished), set(finished)
        source, target = [r for r in range(left, len(self.running)) if r not in gone], [r for r in finished if r < left]
        for step in self.started:
            step.move(finished, source, target)
        if source:
            self._move(source, target)
        del self.running[left:]

    def _move(self, source: list[int], target: list[int]) -> None:
        """Copy rows `source` over rows `target` in every state."""
        moves = Moves(source, target, self.base.world.device)
        moves.copy_cache(self.cache, min(int(self.length_B[source].max()) + self._unread(), self.slots))
        self.rows.move(moves)
        if self.drafter:
            self.drafter.move_rows(source, target)
        self.length_B[target], self.limit_B[target] = self.length_B[source], self.limit_B[source]
        for s, t in zip(source, target, strict=True):
            self.running[t] = self.running[s]
