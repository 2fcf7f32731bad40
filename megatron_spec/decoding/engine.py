"""Decoding with the frozen base: plain, or speculative with a drafter. One loop serves both.

Every step the base reads, for each running sequence, its last known token and the drafted ones, a chain or a tree
(none without a drafter), says what it thinks of them (verify.py), and the accepted ones and one token of the base's own
are added. At temperature 0 the text is the base's greedy text. At a higher temperature it has the base's distribution,
and unless rejection sampling is asked for, it is even the text that the base alone draws from the same numbers.

Sequences of different lengths run side by side: caches are addressed by slot, so rejected tokens need no clean-up,
they are never visible and soon overwritten. Nodes of a tree have the slots behind the text, and the accepted path
closes up. Running sequences occupy the first rows of every cache; when one ends, the last running row moves into its
place, and waiting prompts are prefilled into the free rows behind.

On one GPU a step runs from CUDA graphs (replay.py): nothing in it depends on the host, which waits for the device
once a step, for a table of what was emitted. Rows behind the running ones may then be computed too; they stay inside
their cache, and what they hold is overwritten before it is seen.

A base with longrope reads short and long texts with other frequencies (ops/rope.py): a sequence that grows past the
boundary ends there for its row, and waits to be read anew as a longer prompt.

Every rank of the pipeline and tensor parallel groups takes the same decisions: tokens are reduced over tensor
parallel ranks (sampling.py) and taken from the first pipeline stage. Data-parallel ranks know nothing of each other.

B rows, S rows of one forward, N draft nodes, P rows of an accepted path, L token buffer, C captures width, H hidden
size, V vocabulary, M rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.cache import move_rows, move_slots, rows_view
from megatron_spec.decoding.costs import Costs, NoCosts
from megatron_spec.decoding.drafters import Context, Drafter, Observation, build_drafter
from megatron_spec.decoding.replay import Recorder, Replays, key_step, mapped, padded_rows, recorder_for
from megatron_spec.decoding.tree import Tree, visible_slots
from megatron_spec.decoding.verify import Drafted, Draws, Verdict, choose, verify
from megatron_spec.ops.attention import AttentionPlan, KVCache
from megatron_spec.runtime.platform import to_device

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
            tree): those behind a token that ends the text are as if never proposed.
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    num_base_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_lengths: list[int] = field(default_factory=list)


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
) -> list[Generation]:
    """Answer every prompt; results in the order of the prompts. Collective over the model parallel ranks.

    Args:
        prompts: token ids, not empty, shorter than the base's max_position_embeddings.
        stop_ids: tokens that end an answer.
        draft: a draft model, a second base model or a Drafter; None drafts as config.decoding_type says, or not at all.
        progress: called with (answers done, answers in all) for every answer.
        seeds: one per prompt for temperature > 0; config.seed + the prompt's index otherwise.
        costs: where the time of each phase is kept.
        recorder: of CUDA graphs; default: where they pay, unless config.cuda_graphs is off.

    Raises:
        UserError: an empty or too long prompt, or a base under sequence parallelism.
    """
    answers: dict[int, Generation] = {}
    for index, generation in decode_stream(base, prompts, config, stop_ids, draft, seeds, costs, recorder):
        answers[index] = generation
        if progress:
            progress(len(answers), len(prompts))
    return [answers[i] for i in range(len(prompts))]


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
) -> Iterator[tuple[int, Generation]]:
    """`decode`, yielding (index of the prompt, answer) as answers end."""
    _check(base, prompts)
    drafter, stop_ids = build_drafter(draft, base, config), set(stop_ids)
    seeds = seeds if seeds is not None else [config.seed + i for i in range(len(prompts))]
    if recorder is None and config.cuda_graphs:
        recorder = recorder_for(base)
    for group in _groups(prompts):
        replays = Replays(recorder)
        yield from _Engine(base, prompts, group, config, stop_ids, drafter, seeds, costs or NoCosts(), replays).run()


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
    _, state_SBH = run_base_everywhere(base, batch, AttentionPlan.causal())
    values, ids = sampling.topk(base.logits(state_SBH[-1:])[0], 2, base.world.tp)
    return values[0].tolist(), ids[0].tolist()


@dataclass
class _Sequence:
    """A running sequence as the host knows it: which prompt, its answer, known tokens, most tokens in this row."""

    index: int
    generation: Generation
    length: int
    limit: int


@dataclass
class _Step:
    """What a verification leaves.

    Attributes:
        seen: for the drafter.
        table_BX: accepted, emitted, stopped, over, proposed, then the emitted tokens: all that the host wants to know.
    """

    seen: Observation
    table_BX: Tensor


class _Engine:
    """State of one call of `decode`. Tensors have one row per cache row; rows 0..running-1 are in use."""

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
        self.rows = rows = min(config.batch_size, len(group))
        self.nodes = max(drafter.max_nodes(self.draft_len), self.draft_len) if drafter else 0
        longest = max(self._limit(i) for i in group) + self.nodes + 1
        self.key_step = key_step(longest)
        longest = self._key_slots(longest)
        self.cache: KVCache = base.new_cache(rows, longest)
        if drafter:
            drafter.open(rows, longest)
        device = base.world.device
        self.tokens_BL = torch.zeros(rows, longest + 1, dtype=torch.int64, device=device)
        self.length_B = torch.ones(rows, dtype=torch.int64, device=device)  # known tokens
        self.prompt_B = torch.ones_like(self.length_B)  # tokens of the prompt
        self.limit_B = torch.ones_like(self.length_B)  # most tokens, prompt included
        self.uniform_BN3 = torch.zeros(rows, config.max_new_tokens if config.temperature > 0 else 1, 3, device=device)
        """Numbers for each place of the answer: the base's choice, acceptance, the draft's choice."""
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)

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

    def run(self) -> Iterator[tuple[int, Generation]]:
        """Yield answers as they end."""
        while self.running or self.waiting:
            free = self.rows - len(self.running)
            # A prefill of few prompts costs nearly as much as a step: wait for a quarter of the rows.
            if self.waiting and (not self.running or free * 4 >= self.rows):
                self._prefill(free)
            else:
                self._verify()
            yield from self.ended
            self.ended = []

    # --- one base forward ---------------------------------------------------------------------------------------

    def _forward(
        self, first: int, tokens_BS: Tensor, slots_BS: Tensor, key_slots: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Args: key_slots: how many are looked at; 0: the tokens begin their sequences."""
        view, positions_BS = rows_view(self.cache, first, tokens_BS.shape[0]), slots_BS
        length_B = self.length_B[first : first + tokens_BS.shape[0]]
        if tree is not None:
            visible_BSL = visible_slots(slots_BS[:, 0], tree.above_BSS, key_slots)
            plan = AttentionPlan.cached(view, slots_BS, visible_BSL, key_slots, length_B)
            positions_BS = slots_BS[:, :1] + torch.cat([torch.zeros_like(slots_BS[:, :1]), tree.depth_BN], dim=1)
        elif key_slots:
            plan = AttentionPlan.cached(view, slots_BS, length=key_slots, lengths_B=length_B)
        else:
            plan = AttentionPlan.prefill(view, slots_BS, length_B)
        zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
        return run_base_everywhere(self.base, Batch(tokens_BS, positions_BS, zeros_BS, zeros_BS), plan)

    def _draws(self, rows: slice, place_B: Tensor, count: int) -> Tensor:
        """[B, count, 3] the numbers of `count` places of the answers from `place_B` on."""
        places_BP = place_B[:, None] + torch.arange(count, device=place_B.device)
        places_BP = places_BP.clamp(max=self.uniform_BN3.shape[1] - 1)
        return self.uniform_BN3[rows].gather(1, places_BP[:, :, None].expand(-1, -1, 3))

    def _agree(self, tokens: Tensor) -> Tensor:
        """The first pipeline stage's tokens: stages must never differ, whatever their arithmetic."""
        pp = self.base.world.pp
        if pp.size() > 1:
            tokens = tokens.contiguous()
            dist.broadcast(tokens, src=dist.get_global_rank(pp, 0), group=pp)
        return tokens

    # --- prefill ------------------------------------------------------------------------------------------------

    def _prefill(self, free: int) -> None:
        """Read waiting prompts into the free rows and emit their first tokens."""
        widest = len(self._text(self.waiting[0]))
        count = max(1, min(free, PREFILL_TOKENS // widest, len(self.waiting)))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        first = len(self.running)
        self._place(first, taken)
        tokens_BS = self.tokens_BL[first : first + count, :widest]
        slots_BS = torch.arange(widest, device=tokens_BS.device).repeat(count, 1)
        here, row_B = slice(first, first + count), torch.arange(count, device=tokens_BS.device)
        length_B = self.length_B[here].clone()
        draws_B = self._draws(here, length_B - self.prompt_B[here], 1)[:, 0, 0]
        with self.costs.phase("prefill"):
            captures_SBC, state_SBH = self._forward(first, tokens_BS, slots_BS, 0)
            logits_MV = self.base.logits(state_SBH[length_B - 1, row_B][None])[0]
            chosen_B = choose(logits_MV, draws_B, self.config, self.base.world.tp)
        chosen_B = self._agree(chosen_B)
        self.tokens_BL[here].scatter_(1, length_B[:, None], chosen_B[:, None])
        if self.drafter:
            next_BS = self.tokens_BL[here, 1 : widest + 1]
            self.drafter.observe(Observation(first, slots_BS, next_BS, length_B, captures_SBC, state_SBH, prefill=True))
        for i in taken:
            known, limit = len(self._text(i)), self._row_limit(i)
            self.running.append(_Sequence(i, self.begun.pop(i) if i in self.begun else Generation(), known, limit))
        zeros_B = torch.zeros_like(length_B)
        self._book(first, self._advance(first, chosen_B[:, None], zeros_B, zeros_B).tolist(), verified=False)

    def _place(self, first: int, taken: list[int]) -> None:
        """Fill the rows from `first` on with prompts."""
        here, device = slice(first, first + len(taken)), self.tokens_BL.device
        prompts = [torch.tensor(self._text(i), dtype=torch.int64) for i in taken]
        whole_BL = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        self.tokens_BL[here] = 0
        self.tokens_BL[here, : whole_BL.shape[1]] = to_device(whole_BL, device)
        numbers = [[len(self._text(i)), len(self.prompts[i]), self._row_limit(i)] for i in taken]
        for state, column_B in zip(
            (self.length_B, self.prompt_B, self.limit_B), to_device(torch.tensor(numbers), device).t(), strict=True
        ):
            state[here] = column_B
        if self.config.temperature > 0:
            generators = [torch.Generator().manual_seed(self.seeds[i]) for i in taken]
            # The base's choices first: they are the same numbers whatever else is drawn.
            drawn = [torch.rand(3, self.config.max_new_tokens, generator=g).t() for g in generators]
            self.uniform_BN3[here] = to_device(torch.stack(drawn), device)

    # --- verification -------------------------------------------------------------------------------------------

    def _draft(self, batch: int) -> Drafted:
        """What is proposed for rows 0 .. batch - 1."""
        count = min(self.draft_len, max(s.limit - s.length for s in self.running) - 1)
        if self.replays.active:
            count = self.draft_len  # one shape; nodes that no sequence may still grow do not count
        if count == 0 or self.drafter is None:
            nothing_BN = self.tokens_BL.new_empty(batch, 0)
            return Drafted(nothing_BN, nothing_BN.bool(), None, 0)
        key_slots = self._key_slots(max(s.length for s in self.running) + self.nodes)
        if self.drafter.fixed_shapes:
            name = ("draft", batch, count, key_slots)
            return self.replays.run(name, lambda: self._propose(batch, count, key_slots))
        running = len(self.running)
        drafted = self._propose(running, count, key_slots)
        if running == batch:
            return drafted
        rows_B = torch.arange(batch, device=self.tokens_BL.device).clamp(max=running - 1)
        filled: Drafted = mapped(drafted, lambda tensor: tensor[rows_B])
        return filled

    def _propose(self, batch: int, count: int, key_slots: int) -> Drafted:
        """Ask the drafter; nodes deeper than a sequence may still grow do not count."""
        assert self.drafter is not None
        length_B = self.length_B[:batch]
        room_B = self.limit_B[:batch] - length_B - 1
        lengths = [s.length for s in self.running]
        context = Context(self.tokens_BL[:batch], length_B, lengths=lengths, key_slots=key_slots)
        if self.config.use_rejection_sampling:
            places = self._draws(slice(0, batch), length_B - self.prompt_B[:batch], count)
            context.uniform_BK, context.temperature = places[:, :, 2], self.config.temperature
        proposal = self.drafter.prepare_draft_tokens(context, count)
        tokens_BN = self._agree(proposal.tokens_BN)
        N = tokens_BN.shape[1]
        index_N = torch.arange(N, device=tokens_BN.device)
        tree, depth_BN, depth = None, (index_N + 1).expand(batch, -1), N
        if proposal.parents_BN is not None:
            tree = Tree.of(self._agree(proposal.parents_BN), count)
            depth_BN, depth = tree.depth_BN, count
        valid_BN = depth_BN <= room_B[:, None]
        if proposal.proposed_B is not None:
            valid_BN = valid_BN & (index_N < self._agree(proposal.proposed_B)[:, None])
        return Drafted(tokens_BN, valid_BN, tree, depth, proposal.q_BNV)

    def _verify(self) -> None:
        """One step of every running sequence. Only `table` makes the host wait for the device."""
        running = len(self.running)
        batch = padded_rows(running, self.rows) if self.replays.active else running
        with self.costs.phase("draft"):
            drafted = self._draft(batch)
        key_slots = self._key_slots(max(s.length for s in self.running) + drafted.tokens_BN.shape[1])
        name = ("base", batch, key_slots, drafted.depth)
        with self.costs.phase("base"):
            step = self.replays.run(name, lambda given: self._judged(batch, key_slots, given), drafted)
            table = step.table_BX.tolist()
        if self.drafter:
            with self.costs.phase("observe"):
                self._observe(step.seen, 1 + max(accepted for accepted, *_ in table[:running]))
        self._book(0, table[:running], verified=True)

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

    def _judged(self, batch: int, key_slots: int, drafted: Drafted) -> _Step:
        """Read the drafts, decide, and write down what is emitted: all of a step that the device does alone."""
        length_B = self.length_B[:batch]
        tokens_BS = torch.cat([self.tokens_BL[:batch].gather(1, length_B[:, None] - 1), drafted.tokens_BN], dim=1)
        slots_BS = length_B[:, None] - 1 + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        captures_SBC, state_SBH = self._forward(0, tokens_BS, slots_BS, key_slots, drafted.tree)
        verdict = self._judge(tokens_BS, state_SBH, drafted)
        path_BP, emitted_BP, accepted_B = verdict.path_BP, verdict.emitted_BP, verdict.accepted_B
        places_BP = slots_BS[:, : emitted_BP.shape[1]]
        self.tokens_BL[:batch].scatter_(1, places_BP + 1, emitted_BP)  # behind the accepted ones they mean nothing
        if path_BP is not None:
            move_slots(rows_view(self.cache, 0, batch), slots_BS.gather(1, path_BP), places_BP)
            rows_P1B = (path_BP.t(), torch.arange(batch, device=path_BP.device))
            captures_SBC, state_SBH = captures_SBC[rows_P1B], state_SBH[rows_P1B]
        depth_BN = drafted.tree.depth_BN if drafted.tree is not None else places_BP[:, 1:] - places_BP[:, :1]
        proposed_B = torch.cat([accepted_B[:, None] * 0, depth_BN * drafted.valid_BN], dim=1).amax(dim=1)
        seen = Observation(0, places_BP, emitted_BP, accepted_B + 1, captures_SBC, state_SBH, key_slots)
        return _Step(seen, self._advance(0, emitted_BP, accepted_B, proposed_B))

    def _judge(self, tokens_BS: Tensor, state_SBH: Tensor, drafted: Drafted) -> Verdict:
        batch = tokens_BS.shape[0]
        places = self._draws(slice(0, batch), self.length_B[:batch] - self.prompt_B[:batch], drafted.depth + 1)
        draws = Draws(places[:, :, 0], places[:, :, 1])
        logits_BSV = self.base.logits(state_SBH).transpose(0, 1)
        thinking_BS = self._thinking(tokens_BS, drafted) if self.config.use_relaxed_acceptance_for_thinking else None
        verdict = verify(logits_BSV, drafted, draws, self.config, self.base.world.tp, thinking_BS)
        verdict.emitted_BP, verdict.accepted_B = self._agree(verdict.emitted_BP), self._agree(verdict.accepted_B)
        if verdict.path_BP is not None:
            verdict.path_BP = self._agree(verdict.path_BP)
        return verdict

    def _thinking(self, tokens_BS: Tensor, drafted: Drafted) -> Tensor:
        """bool [B, S]: the token behind this verification row stands in a thinking phase."""
        begin, end = self.config.begin_thinking_phase_token, self.config.end_thinking_phase_token
        batch, N = drafted.tokens_BN.shape
        here_L = torch.arange(self.tokens_BL.shape[1], device=tokens_BS.device)
        known_BL = here_L < self.length_B[:batch, None]
        last_begin_B, last_end_B = (
            ((self.tokens_BL[:batch] == token) & known_BL).long().mul(here_L + 1).amax(dim=1) for token in (begin, end)
        )
        inside_BS = (last_begin_B > last_end_B)[:, None].expand(-1, N + 1)
        parent_BN = torch.arange(N, device=tokens_BS.device).expand(batch, -1)
        parent_BN = parent_BN if drafted.tree is None else drafted.tree.parent_row_BN
        for _ in range(drafted.depth):
            inherited_BN = inside_BS.gather(1, parent_BN)
            inside_BN = (inherited_BN | (drafted.tokens_BN == begin)) & (drafted.tokens_BN != end)
            inside_BS = torch.cat([inside_BS[:, :1], inside_BN], dim=1)
        return inside_BS

    # --- bookkeeping --------------------------------------------------------------------------------------------

    def _advance(self, first: int, chosen_BP: Tensor, accepted_B: Tensor, proposed_B: Tensor) -> Tensor:
        """Lengthen rows `first`.. by what they emit, up to a stop token; see `_Step.table_BX`."""
        here = slice(first, first + chosen_BP.shape[0])
        stops_BP = (chosen_BP[:, :, None] == self.stop_ids).any(dim=2)
        stops_BP = stops_BP & (torch.arange(chosen_BP.shape[1], device=chosen_BP.device) <= accepted_B[:, None])
        stopped_B = stops_BP.any(dim=1)
        emitted_B = torch.where(stopped_B, stops_BP.long().argmax(dim=1), accepted_B) + 1
        length_B = torch.minimum(self.length_B[here] + emitted_B, self.limit_B[here])  # rows not in use stay inside
        self.length_B[here] = length_B
        over_B = stopped_B | (length_B >= self.limit_B[here])
        return torch.cat([torch.stack([accepted_B, emitted_B, stopped_B, over_B, proposed_B], dim=1), chosen_BP], dim=1)

    def _book(self, first: int, table: list[list[int]], verified: bool) -> None:
        """Add the emitted tokens of rows `first`.. to their answers and free the ended rows."""
        ended: list[int] = []
        for row, (_, emitted, stopped, over, proposed, *chosen) in enumerate(table, start=first):
            sequence = self.running[row]
            generation = sequence.generation
            sequence.length += emitted
            generation.tokens += chosen[:emitted]
            generation.stopped = bool(stopped)
            generation.num_base_forwards += 1
            if self.drafter and (verified or len(generation.tokens) > emitted):
                generation.accepted_lengths.append(emitted - 1)
                generation.drafted_lengths.append(emitted - 1 if stopped else proposed)
            if over:
                ended.append(row)
        if ended:
            self._free(ended)

    def _free(self, ended: list[int]) -> None:
        """Move the last running rows into the places of the ended ones."""
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
            for state in (self.tokens_BL, self.length_B, self.prompt_B, self.limit_B, self.uniform_BN3):
                state[target] = state[source]
            if self.drafter:
                self.drafter.move_rows(source, target)
        for s, t in zip(source, target, strict=True):
            self.running[t] = self.running[s]
        del self.running[left:]
