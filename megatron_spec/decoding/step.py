"""Device side of a decoding step: base forwards over the running rows, drafting, verification.

Nothing here reads values on the host, except to check the proposals of a user's drafter, so a step can be replayed as a
CUDA graph (replay.py). All ranks of the pipeline and tensor parallel groups choose the same tokens: they are reduced
over tensor parallel ranks (sampling.py) and broadcast from the first pipeline stage.

B rows, S rows of one forward, N draft nodes, P rows of an accepted path, C captures width, H hidden size, M rows of
logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import DecodeConfig
from megatron_spec.decoding.cache import move_slots, rows_view
from megatron_spec.decoding.drafters import Context, Drafter, Observation
from megatron_spec.decoding.drafters.lookup import replaced
from megatron_spec.decoding.drafters.user import check_proposal, is_foreign
from megatron_spec.decoding.matches import looked_up
from megatron_spec.decoding.rows import Rows
from megatron_spec.decoding.tree import Tree
from megatron_spec.decoding.verify import Drafted, Draws, Verdict, choose, thinking_rows, verify
from megatron_spec.ops import backend
from megatron_spec.ops.visibility import KVCache, Visibility


@dataclass
class Step:
    """Result of a base forward.

    Attributes:
        seen: input of `Drafter.observe`.
        table_BX: `rows.Outcome`s for the host.
    """

    seen: Observation
    table_BX: Tensor


@dataclass
class Common:
    """What was read of a prompt that many sequences begin with: keys and values [layers, 1, S, ...], logits [1, V]."""

    keys: Tensor
    values: Tensor
    logits_1V: Tensor


class DeviceSteps:
    """Forwards over the rows of `session.Buffers`."""

    def __init__(
        self, base: FrozenBase, config: DecodeConfig, rows: Rows, cache: KVCache, drafter: Drafter | None
    ) -> None:
        self.base, self.config, self.rows, self.cache, self.drafter = base, config, rows, cache, drafter
        self.foreign = is_foreign(drafter)
        kind = base.paths.kernels("sample_kernel")
        self.kernels = None if kind == "none" else backend.load(kind)

    def prefill(self, first: int, count: int, widest: int) -> Step:
        """Read the prompts in rows first .. first + count - 1 and choose their first tokens."""
        rows, here = self.rows, slice(first, first + count)
        tokens_BS, length_B = rows.tokens_BL[here, :widest], rows.length_B[here].clone()
        slots_BS = torch.arange(widest, device=tokens_BS.device).repeat(count, 1)
        row_B = torch.arange(count, device=tokens_BS.device)
        captures_SBC, state_SBH = self._forward(first, tokens_BS, slots_BS, 0)
        logits_MV = self.base.logits(state_SBH[length_B - 1, row_B][None])[0]
        chosen_B = self._first_tokens(first, logits_MV)
        next_BS, zeros_B = rows.tokens_BL[here, 1 : widest + 1], torch.zeros_like(length_B)
        seen = Observation(first, slots_BS, next_BS, length_B, captures_SBC, state_SBH, prefill=True)
        return Step(seen, rows.advance(first, chosen_B[:, None], zeros_B, zeros_B))

    def read_common(self, row: int, widest: int) -> Common:
        """Read the prompt of a row, for `begin`."""
        tokens_BS = self.rows.tokens_BL[row : row + 1, :widest]
        slots_BS = torch.arange(widest, device=tokens_BS.device)[None]
        state_SBH = self._forward(row, tokens_BS, slots_BS, 0)[1]
        view = rows_view(self.cache, row, 1)
        keys, values = view.keys[:, :, :widest].clone(), view.values[:, :, :widest].clone()
        return Common(keys, values, self.base.logits(state_SBH[-1:])[0])

    def begin(self, first: int, count: int, common: Common) -> Tensor:
        """`prefill` of rows that all hold the prompt of `common`. Returns their table [B, X]."""
        view, widest = rows_view(self.cache, first, count), common.keys.shape[2]
        view.keys[:, :, :widest], view.values[:, :, :widest] = common.keys, common.values
        chosen_B = self._first_tokens(first, common.logits_1V.repeat(count, 1))
        zeros_B = torch.zeros_like(chosen_B)
        return self.rows.advance(first, chosen_B[:, None], zeros_B, zeros_B)

    def _first_tokens(self, first: int, logits_BV: Tensor) -> Tensor:
        """[B] first tokens of the answers of rows `first`.., placed after their prompts."""
        rows, here = self.rows, slice(first, first + len(logits_BV))
        draws_B = rows.draws(len(logits_BV), 1, first)[:, 0, 0]
        chosen_B = self._agree(choose(logits_BV, draws_B, self.config, self.base.world.tp, self.kernels))
        rows.tokens_BL[here].scatter_(1, rows.length_B[here, None], chosen_B[:, None])
        return chosen_B

    def nothing(self, batch: int) -> Drafted:
        """No proposal."""
        nothing_BN = self.rows.tokens_BL.new_empty(batch, 0)
        return Drafted(nothing_BN, nothing_BN.bool(), None, 0)

    def cycle(self, batch: int, count: int, key_slots: int) -> Tensor:
        """A whole step: proposal of depth `count` (0: none), verification, observation. Returns its table [B, X]."""
        drafted = self.propose(batch, count, key_slots, ()) if count else self.nothing(batch)
        step = self.verify(batch, key_slots, drafted)
        if self.drafter is not None:
            self.drafter.observe(step.seen)
        return step.table_BX

    def propose(self, batch: int, count: int, key_slots: int, lengths: Sequence[int]) -> Drafted:
        """The drafter's proposal, or the lookup's in its place; nodes past a sequence's limit are invalid."""
        assert self.drafter is not None
        length_B = self.rows.length_B[:batch]
        room_B = self.rows.limit_B[:batch] - length_B - 1
        context = Context(self.rows.tokens_BL[:batch], length_B, lengths=lengths, key_slots=key_slots)
        if self.config.use_rejection_sampling:
            context.uniform_BK = self.rows.draws(batch, count)[:, :, 2]
            context.temperature = self.config.temperature
        proposal = self.drafter.prepare_draft_tokens(context, count)
        if self.foreign:
            check_proposal(proposal, batch, self.base.vocab_size, self.drafter, self.config.max_draft_len, count)
        tokens_BN = self._agree(proposal.tokens_BN)
        N = tokens_BN.shape[1]
        index_N = torch.arange(N, device=tokens_BN.device)
        tree, depth_BN, depth = None, (index_N + 1).expand(batch, -1), N
        if proposal.parents_BN is not None:
            depth = min(count, N)  # a tree of few nodes may have fewer levels than a chain
            tree = Tree.of(self._agree(proposal.parents_BN), depth)
            depth_BN = tree.depth_BN
        valid_BN = depth_BN <= room_B[:, None]
        if proposal.proposed_B is not None:
            valid_BN = valid_BN & (index_N < self._agree(proposal.proposed_B)[:, None])
        drafted = Drafted(tokens_BN, valid_BN, tree, depth, proposal.q_BNV)
        return drafted if self.rows.matches_BL is None else self._looked_up(drafted, room_B)

    def _looked_up(self, drafted: Drafted, room_B: Tensor) -> Drafted:
        """The draft's tokens or, after a match that is long enough, what followed it, up to `room_B` tokens."""
        rows, (batch, count), threshold = self.rows, drafted.tokens_BN.shape, self.config.sa_threshold
        assert rows.matches_BL is not None and threshold is not None
        texts = rows.matches_BL[:batch], rows.tokens_BL[:batch], rows.length_B[:batch]
        tokens_BN, known_B = looked_up(*texts, threshold, count)
        return replaced(drafted, tokens_BN, torch.minimum(known_B, room_B))

    def verify(self, batch: int, key_slots: int, drafted: Drafted) -> Step:
        """Verify the drafts and store the emitted tokens: all of a step after drafting."""
        length_B = self.rows.length_B[:batch]
        tokens_BS = torch.cat([self.rows.tokens_BL[:batch].gather(1, length_B[:, None] - 1), drafted.tokens_BN], dim=1)
        slots_BS = length_B[:, None] - 1 + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        captures_SBC, state_SBH = self._forward(0, tokens_BS, slots_BS, key_slots, drafted.tree)
        verdict = self._verdict(tokens_BS, state_SBH, drafted)
        path_BP, emitted_BP, accepted_B = verdict.path_BP, verdict.emitted_BP, verdict.accepted_B
        path_slots_BP = slots_BS[:, : emitted_BP.shape[1]]
        self.rows.tokens_BL[:batch].scatter_(1, path_slots_BP + 1, emitted_BP)  # meaningless after the bonus token
        if path_BP is not None:
            move_slots(rows_view(self.cache, 0, batch), slots_BS.gather(1, path_BP), path_slots_BP)
            rows_P1B = (path_BP.t(), torch.arange(batch, device=path_BP.device))
            captures_SBC, state_SBH = captures_SBC[rows_P1B], state_SBH[rows_P1B]
        depth_BN = drafted.tree.depth_BN if drafted.tree is not None else path_slots_BP[:, 1:] - path_slots_BP[:, :1]
        proposed_B = torch.cat([accepted_B[:, None] * 0, depth_BN * drafted.valid_BN], dim=1).amax(dim=1)
        seen = Observation(0, path_slots_BP, emitted_BP, accepted_B + 1, captures_SBC, state_SBH, key_slots)
        return Step(seen, self.rows.advance(0, emitted_BP, accepted_B, proposed_B))

    def _forward(
        self, first: int, tokens_BS: Tensor, slots_BS: Tensor, key_slots: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Args: key_slots: number of cache slots to read; 0: the tokens begin their sequences."""
        view, positions_BS = rows_view(self.cache, first, tokens_BS.shape[0]), slots_BS
        length_B = self.rows.length_B[first : first + tokens_BS.shape[0]]
        if tree is not None:
            visibility = Visibility.cached(view, slots_BS, None, key_slots, length_B, tree.above_BSS)
            positions_BS = slots_BS[:, :1] + torch.cat([torch.zeros_like(slots_BS[:, :1]), tree.depth_BN], dim=1)
        elif key_slots:
            visibility = Visibility.cached(view, slots_BS, length=key_slots, lengths_B=length_B)
        else:
            visibility = Visibility.prefill(view, slots_BS, length_B)
        zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
        return run_base_everywhere(self.base, Batch(tokens_BS, positions_BS, zeros_BS, zeros_BS), visibility)

    def _logits(self, state_BSH: Tensor) -> Tensor:
        """`FrozenBase.logits` of a step of the base or a verification: one product for all rows, which reads the head
        once."""
        direct, (B, S, _) = self.base.direct, state_BSH.shape
        if direct is None or direct.decode is None or not direct.decode.few(B, S):
            return self.base.logits(state_BSH)
        logits_RV = direct.decode.head(state_BSH.reshape(B * S, -1), self.base.head_weight)
        logits_RV[:, self.base.vocab_size :].fill_(float("-inf"))  # this rank has the whole vocabulary
        return logits_RV.view(B, S, -1)

    def _verdict(self, tokens_BS: Tensor, state_SBH: Tensor, drafted: Drafted) -> Verdict:
        batch = tokens_BS.shape[0]
        numbers = self.rows.draws(batch, drafted.depth + 1)
        draws = Draws(numbers[:, :, 0], numbers[:, :, 1])
        logits_BSV = self._logits(state_SBH.transpose(0, 1))  # the state is less to copy than the logits
        thinking_BS = None
        if self.config.use_relaxed_acceptance_for_thinking:
            rows = self.rows
            thinking_BS = thinking_rows(rows.tokens_BL[:batch], rows.length_B[:batch], drafted, self.config)
        verdict = verify(logits_BSV, drafted, draws, self.config, self.base.world.tp, thinking_BS, self.kernels)
        verdict.emitted_BP, verdict.accepted_B = self._agree(verdict.emitted_BP), self._agree(verdict.accepted_B)
        if verdict.path_BP is not None:
            verdict.path_BP = self._agree(verdict.path_BP)
        return verdict

    def _agree(self, tokens: Tensor) -> Tensor:
        """Broadcast from the first pipeline stage, so that rounding cannot make stages differ."""
        pp = self.base.world.pp
        if pp.size() > 1:
            tokens = tokens.contiguous()
            dist.broadcast(tokens, src=dist.get_global_rank(pp, 0), group=pp)
        return tokens
