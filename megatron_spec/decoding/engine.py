"""Decoding with the frozen base: plain, or speculative with a drafter. One loop serves both.

Every step the base reads, for each running sequence, its last known token and K draft tokens (K = 0 without a
drafter), and chooses a token after each of them. Drafts are accepted as long as they equal the base's choice, then
the base's own next token is added (ALGORITHMS: verification). At temperature 0 the choice is the argmax. At a higher
temperature it is a sample drawn with one uniform number per sequence and token: a draft token is then accepted with
exactly the base's probability of it, and the text has the base's distribution, and is even the text that the base
alone draws from the same numbers.

Sequences of different lengths run side by side: caches are addressed by slot, so rejected tokens need no clean-up,
they are never visible and soon overwritten. Running sequences occupy the first rows of every cache; when one ends,
the last running row moves into its place, and waiting prompts are prefilled into the free rows behind.

Every rank of the pipeline and tensor parallel groups takes the same decisions: tokens are reduced over tensor
parallel ranks (sampling.py) and taken from the first pipeline stage. Data-parallel ranks know nothing of each other.

B rows, S rows of one forward, K drafts, L token buffer, C captures width, H hidden size, V vocabulary, N logit rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.batch import Batch
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.cache import move_rows, rows_view
from megatron_spec.decoding.drafters import Context, Drafter, Observation, build_drafter
from megatron_spec.ops.attention import AttentionPlan, KVCache
from megatron_spec.pipeline.model import FrozenBase
from megatron_spec.pipeline.schedule import run_base_everywhere

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
        drafted_lengths: per verification step, the draft tokens that could have counted: those behind a token that
            ends the text are as if never proposed.
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
) -> list[Generation]:
    """Answer every prompt; results in the order of the prompts. Collective over the model parallel ranks.

    Args:
        prompts: token ids, not empty, shorter than the base's max_position_embeddings.
        stop_ids: tokens that end an answer.
        draft: a draft model or a Drafter; None decodes with the base alone.
        progress: called with (answers done, answers in all) for every answer.
        seeds: one per prompt for temperature > 0; config.seed + the prompt's index otherwise.

    Raises:
        UserError: an empty or too long prompt, or a base under sequence parallelism.
    """
    answers: dict[int, Generation] = {}
    for index, generation in decode_stream(base, prompts, config, stop_ids, draft, seeds):
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
) -> Iterator[tuple[int, Generation]]:
    """`decode`, yielding (index of the prompt, answer) as answers end."""
    _check(base, prompts)
    drafter, stop_ids = build_drafter(draft, base), set(stop_ids)
    seeds = seeds if seeds is not None else [config.seed + i for i in range(len(prompts))]
    for group in _groups(prompts):
        yield from _Engine(base, prompts, group, config, stop_ids, drafter, seeds).run()


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


class _Engine:
    """State of one call of `decode`. Tensors have one row per cache row; rows 0..running-1 are in use."""

    def __init__(
        self, base: FrozenBase, prompts: Sequence[Sequence[int]], group: list[int], config: DecodeConfig,
        stop_ids: set[int], drafter: Drafter | None, seeds: Sequence[int],
    ) -> None:  # fmt: skip
        self.base, self.prompts, self.config, self.drafter, self.seeds = base, prompts, config, drafter, seeds
        device = base.world.device
        self.waiting = group  # longest first: neighbours in a batch have similar lengths
        self.running: list[tuple[int, Generation]] = []  # prompt and answer of each row in use
        self.ended: list[tuple[int, Generation]] = []
        self.draft_len = config.max_draft_len if drafter else 0
        rows = min(config.batch_size, len(group))
        longest = max(self._limit(i) for i in group) + self.draft_len + 1
        self.cache: KVCache = base.new_cache(rows, longest)
        if drafter:
            drafter.open(rows, longest)
        self.tokens_BL = torch.zeros(rows, longest + 1, dtype=torch.int64, device=device)
        self.length_B = torch.zeros(rows, dtype=torch.int64, device=device)  # known tokens
        self.prompt_B = torch.zeros_like(self.length_B)  # tokens of the prompt
        self.limit_B = torch.zeros_like(self.length_B)  # most tokens, prompt included
        self.uniform_BN = torch.zeros(rows, config.max_new_tokens, device=device)
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)

    def _limit(self, i: int) -> int:
        return min(len(self.prompts[i]) + self.config.max_new_tokens, self.base.config.max_position_embeddings)

    def run(self) -> Iterator[tuple[int, Generation]]:
        """Yield answers as they end."""
        rows = self.tokens_BL.shape[0]
        while self.running or self.waiting:
            free = rows - len(self.running)
            # A prefill of few prompts costs nearly as much as a step: wait for a quarter of the rows.
            if self.waiting and (not self.running or free * 4 >= rows):
                self._prefill(free)
            else:
                self._verify()
            yield from self.ended
            self.ended = []

    # --- one base forward ---------------------------------------------------------------------------------------

    def _forward(self, first: int, tokens_BS: Tensor, slots_BS: Tensor) -> tuple[Tensor, Tensor]:
        zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
        batch = Batch(tokens_BS, slots_BS, zeros_BS, zeros_BS)
        view = rows_view(self.cache, first, tokens_BS.shape[0])
        return run_base_everywhere(self.base, batch, AttentionPlan.cached(view, slots_BS))

    def _choose(self, state_NH: Tensor, uniform_N: Tensor) -> Tensor:
        logits_NV = self.base.logits(state_NH[None])[0]
        group = self.base.world.tp
        if self.config.temperature == 0:
            return self._agree(sampling.argmax(logits_NV, group))
        return self._agree(sampling.sample(logits_NV, uniform_N, self.config.temperature, group))

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
        widest = len(self.prompts[self.waiting[0]])
        count = max(1, min(free, PREFILL_TOKENS // widest, len(self.waiting)))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        first = len(self.running)
        self._place(first, taken)
        tokens_BS = self.tokens_BL[first : first + count, :widest]
        slots_BS = torch.arange(widest, device=tokens_BS.device).repeat(count, 1)
        captures_SBC, state_SBH = self._forward(first, tokens_BS, slots_BS)
        here, row_B = slice(first, first + count), torch.arange(count, device=tokens_BS.device)
        prompt_B = self.prompt_B[here]
        chosen_B = self._choose(state_SBH[prompt_B - 1, row_B], self.uniform_BN[here, 0])
        self.tokens_BL[here].scatter_(1, prompt_B[:, None], chosen_B[:, None])
        if self.drafter:
            next_BS = self.tokens_BL[here, 1 : widest + 1]
            self.drafter.observe(Observation(first, slots_BS, next_BS, prompt_B.clone(), captures_SBC, state_SBH))
        self.running += [(i, Generation()) for i in taken]
        self._finish(first, chosen_B[:, None], torch.ones_like(prompt_B))

    def _place(self, first: int, taken: list[int]) -> None:
        for row, i in enumerate(taken, start=first):
            prompt = torch.tensor(self.prompts[i], dtype=torch.int64)
            self.tokens_BL[row].zero_()
            self.tokens_BL[row, : len(prompt)] = prompt.to(self.tokens_BL.device)
            self.length_B[row] = self.prompt_B[row] = len(prompt)
            self.limit_B[row] = self._limit(i)
            if self.config.temperature > 0:
                generator = torch.Generator().manual_seed(self.seeds[i])
                self.uniform_BN[row] = torch.rand(self.config.max_new_tokens, generator=generator)

    # --- verification -------------------------------------------------------------------------------------------

    def _draft(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draft tokens [B, K] and how many of them are proposed [B]; never more than a sequence may still emit."""
        room_B = self.limit_B[:batch] - self.length_B[:batch] - 1
        count = min(self.draft_len, int(room_B.max())) if self.drafter else 0
        if count == 0 or self.drafter is None:
            return self.tokens_BL.new_empty(batch, 0), torch.zeros_like(room_B)
        context = Context(self.tokens_BL[:batch], self.length_B[:batch])
        drafts_BK, proposed_B = self.drafter.prepare_draft_tokens(context, count)
        if proposed_B is None:
            proposed_B = torch.full_like(room_B, count)
        return self._agree(drafts_BK), self._agree(torch.minimum(proposed_B, room_B))

    def _verify(self) -> None:
        """One step of every running sequence."""
        batch = len(self.running)
        drafts_BK, proposed_B = self._draft(batch)
        length_B = self.length_B[:batch]
        tokens_BS = torch.cat([self.tokens_BL[:batch].gather(1, length_B[:, None] - 1), drafts_BK], dim=1)
        step_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        slots_BS = length_B[:, None] - 1 + step_S
        captures_SBC, state_SBH = self._forward(0, tokens_BS, slots_BS)
        drawn_BS = (slots_BS + 1 - self.prompt_B[:batch, None]).clamp(max=self.config.max_new_tokens - 1)
        chosen_BS = self._choose(
            state_SBH.transpose(0, 1).reshape(tokens_BS.numel(), -1),
            self.uniform_BN[:batch].gather(1, drawn_BS).flatten(),
        ).view_as(tokens_BS)
        agree_BK = (drafts_BK == chosen_BS[:, :-1]) & (step_S[:-1] < proposed_B[:, None])
        accepted_B = agree_BK.long().cumprod(dim=1).sum(dim=1)
        self.tokens_BL[:batch].scatter_(1, slots_BS + 1, chosen_BS)  # entries behind the accepted ones mean nothing
        if self.drafter:
            S = int(accepted_B.max()) + 1
            self.drafter.observe(Observation(
                0, slots_BS[:, :S], chosen_BS[:, :S], accepted_B + 1, captures_SBC[:S], state_SBH[:S]
            ))  # fmt: skip
        self._finish(0, chosen_BS, accepted_B + 1, proposed_B)

    # --- bookkeeping --------------------------------------------------------------------------------------------

    def _finish(self, first: int, chosen_BS: Tensor, emitted_B: Tensor, proposed_B: Tensor | None = None) -> None:
        """Add the emitted tokens of rows first.. to their answers (cut at a stop token) and free the ended rows."""
        step_S = torch.arange(chosen_BS.shape[1], device=chosen_BS.device)
        stops_BS = torch.isin(chosen_BS, self.stop_ids) & (step_S < emitted_B[:, None])
        stopped_B = stops_BS.any(dim=1)
        emitted_B = torch.where(stopped_B, stops_BS.long().argmax(dim=1) + 1, emitted_B)
        length_B = self.length_B[first : first + chosen_BS.shape[0]]
        length_B += emitted_B
        ended_B = stopped_B | (length_B >= self.limit_B[first : first + chosen_BS.shape[0]])
        columns = [emitted_B, stopped_B, ended_B, *([proposed_B] if proposed_B is not None else [])]
        table = torch.stack([c.long() for c in columns], dim=1).tolist()  # one transfer
        ended: list[int] = []
        for row, ((emitted, stopped, over, *proposed), chosen) in enumerate(
            zip(table, chosen_BS.tolist(), strict=True), start=first
        ):
            generation = self.running[row][1]
            generation.tokens += chosen[:emitted]
            generation.stopped = bool(stopped)
            generation.num_base_forwards += 1
            if self.drafter and proposed:
                generation.accepted_lengths.append(emitted - 1)
                generation.drafted_lengths.append(emitted - 1 if stopped else proposed[0])
            if over:
                ended.append(row)
        if ended:
            self._free(ended)

    def _free(self, ended: list[int]) -> None:
        """Move the last running rows into the places of the ended ones."""
        self.ended += [self.running[row] for row in ended]
        left = len(self.running) - len(ended)
        target = [r for r in ended if r < left]
        source = [r for r in range(left, len(self.running)) if r not in set(ended)]
        if source:
            move_rows(self.cache, source, target)
            for state in (self.tokens_BL, self.length_B, self.prompt_B, self.limit_B, self.uniform_BN):
                state[target] = state[source]
            if self.drafter:
                self.drafter.move_rows(source, target)
        for s, t in zip(source, target, strict=True):
            self.running[t] = self.running[s]
        del self.running[left:]
