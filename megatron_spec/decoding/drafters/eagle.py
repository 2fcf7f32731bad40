"""EAGLE and MTP drafting with a draft KV cache (docs/algorithms.md#training-time-test): a chain, or a tree.

Draft row j reads the base features of position j and the token of position j + 1, and predicts the token of position
j + 2. Rows of verified tokens run with true base features. The last of them predicts the first draft token; draft step
k then feeds back the draft's hidden state with the token just drafted, at rotary position j + k and in cache slot
j + k, so it sees the true rows <= j and its own earlier steps, as in training. The next observation starts at slot
j + 1 and overwrites the slots of these steps, so rollback is free.

In a tree (EAGLE-2) every expanded node has a slot of its own after j, sees the true rows and its ancestors, and has
the rotary position of its depth: every path computes what a chain would.

B rows of the running batch, S rows of one observation, C captures width, H draft hidden size, k expanded nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_spec.decoding import cache as cache_rows
from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal
from megatron_spec.decoding.drafters.choice import Choice
from megatron_spec.decoding.drafters.grow import Level, grow
from megatron_spec.drafts.recurrent import RecurrentDraft
from megatron_spec.ops.visibility import Visibility

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


class _KnownIds:
    """The base's embedding, for ids that need no check: the base has read them, or a model has chosen them."""

    def __init__(self, base: FrozenBase) -> None:
        self.base = base

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """See `BaseEnds`."""
        return self.base.embed(tokens_BS, known=True)


class EagleDrafter(Drafter):
    """Chains from a draft that runs on its own output, sharded over the base's tensor parallel group."""

    fixed_shapes = True
    spare_slots = 0
    """Number of cache slots needed after those of the text."""

    def __init__(self, draft: RecurrentDraft, base: FrozenBase) -> None:
        self.draft, self.base = draft, base
        self.group = base.world.tp
        self.ends: Any = _KnownIds(base)
        self.choose = Choice(draft.vocab, base)

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.cache = self.draft.new_cache(rows, max_length + self.spare_slots)
        weight = next(self.draft.parameters())
        hidden = self.draft.config.hidden_size
        self.fed_back_BH = torch.zeros(rows, hidden, dtype=weight.dtype, device=weight.device)
        self.normed_BH = torch.zeros_like(self.fed_back_BH)
        self.position_B = torch.zeros(rows, dtype=torch.int64, device=weight.device)

    def _step(
        self, hidden_SBH: Tensor, tokens_BS: Tensor, positions_BS: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        embedding_SBH = self.draft.embed(tokens_BS, self.ends)
        attention = self.draft.cached_attention(visibility)
        return self.draft.layer_step(hidden_SBH, embedding_SBH, positions_BS, attention)

    def _earlier(self, slots_BS: Tensor, first: int, key_slots: int) -> Visibility:
        view = cache_rows.rows_view(self.cache, first, slots_BS.shape[0])
        return Visibility.cached(view, slots_BS, length=key_slots)

    def observe(self, seen: Observation) -> None:
        """Run the verified rows with true features; keep the last state of each sequence."""
        hidden_SBH = self.draft.start(seen.captures_SBC, seen.state_SBH)
        if seen.prefill:
            view = cache_rows.rows_view(self.cache, seen.first, seen.slots_BS.shape[0])
            visibility = Visibility.prefill(view, seen.slots_BS)
        else:
            visibility = self._earlier(seen.slots_BS, seen.first, seen.key_slots)
        fed_back_SBH, normed_SBH = self._step(hidden_SBH, seen.next_tokens_BS, seen.slots_BS, visibility)
        batch = seen.counts_B.shape[0]
        row_B = torch.arange(batch, device=seen.counts_B.device)
        last_B = seen.counts_B - 1
        here = slice(seen.first, seen.first + batch)
        self.fed_back_BH[here] = fed_back_SBH[last_B, row_B]
        self.normed_BH[here] = normed_SBH[last_B, row_B]
        self.position_B[here] = seen.slots_BS[row_B, last_B]

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Always proposes `count` tokens."""
        batch = context.lengths_B.shape[0]
        fed_back_SBH, normed_SBH = self.fed_back_BH[None, :batch], self.normed_BH[None, :batch]
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for k in range(count):
            if k:
                slots_BS = self.position_B[:batch, None] + k
                visibility = self._earlier(slots_BS, 0, context.key_slots)
                fed_back_SBH, normed_SBH = self._step(fed_back_SBH, tokens[-1][:, None], slots_BS, visibility)
            tokens.append(self.choose(self.draft.logits(normed_SBH, self.base)[0], context, k, q))
        return Proposal(torch.stack(tokens, dim=1), q_BNV=torch.stack(q, dim=1) if q else None)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        states = [self.fed_back_BH, self.normed_BH, self.position_B]
        cache_rows.move_rows(source, target, [self.cache], states)


class EagleTreeDrafter(EagleDrafter):
    """EAGLE-2: the `total` most likely nodes of a tree, by joint draft probability."""

    def __init__(self, draft: RecurrentDraft, base: FrozenBase, depth: int, width: int, total: int) -> None:
        super().__init__(draft, base)
        self.width, self.total = min(width, len(draft.vocab) // self.group.size()), total
        self.spare_slots = (depth - 1) * self.width

    def max_nodes(self, count: int) -> int:
        """See Drafter."""
        return self.total

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter."""
        batch, k = context.lengths_B.shape[0], self.width
        position_B = self.position_B[:batch]
        cache = cache_rows.rows_view(self.cache, 0, batch)
        length = context.key_slots + self.spare_slots
        fed_back_kBH = self.fed_back_BH[None, :batch].expand(k, -1, -1)
        root = torch.arange(batch, device=position_B.device)

        def children(level: Level) -> tuple[Tensor, Tensor]:
            """Log-probabilities and tokens of the most likely children of a level."""
            nonlocal fed_back_kBH
            used = level.above_BkM.shape[2]
            hidden_kBH = fed_back_kBH[level.parent_Bk.t(), root]
            slots_Bk = position_B[:, None] + 1 + torch.arange(used - k, used, device=position_B.device)
            visibility = Visibility.cached(cache, slots_Bk, length=length, above_BSM=level.above_BkM)
            positions_Bk = (position_B[:, None] + level.depth).expand(-1, k)
            fed_back_kBH, normed_kBH = self._step(hidden_kBH, level.tokens_Bk, positions_Bk, visibility)
            logp, ids = self._top(self.draft.logits(normed_kBH, self.base).flatten(0, 1))
            return logp.view(k, batch, k).transpose(0, 1), ids.view(k, batch, k).transpose(0, 1)

        logp_Bk, tokens_Bk = self._top(self.draft.logits(self.normed_BH[None, :batch], self.base)[0])
        return grow(logp_Bk, tokens_Bk, count, self.total, children)

    def _top(self, logits_ND: Tensor) -> tuple[Tensor, Tensor]:
        logp_Nk, ids_Nk = sampling.top_log_probs(logits_ND, self.width, self.group)
        return logp_Nk, self.choose.target(ids_Nk)
