"""EAGLE and MTP chain drafting with a draft KV cache (arXiv 2503.01840; ALGORITHMS: training-time test).

Draft row j holds the base features of position j and the token of position j + 1; it predicts the token of position
j + 2. Rows of verified tokens are run with their true base features. The last of them gives the first draft token;
draft step k then feeds back the draft's own hidden state with the token just drafted, at rotary position j + k and in
cache slot j + k, so it sees the true rows <= j and its own earlier steps: exactly the rows it was trained on. The
next observation starts at slot j + 1 and overwrites what the steps left there: rolling back costs nothing.

B rows of the running batch, S rows of one observation, C captures width, H draft hidden size, K draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_spec.decoding import cache as cache_rows
from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.base import Context, Observation
from megatron_spec.drafts.recurrent import RecurrentDraft
from megatron_spec.ops.attention import AttentionPlan, attend

if TYPE_CHECKING:
    from megatron_spec.pipeline.model import FrozenBase


class EagleDrafter:
    """Greedy chain of a draft that runs on its own output; sharded over the base's tensor parallel group."""

    def __init__(self, draft: RecurrentDraft, base: FrozenBase) -> None:
        self.draft, self.base = draft, base
        self.group = base.world.tp
        self.d2t_D = None if draft.vocab.is_full else draft.vocab.d2t.to(base.world.device)

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.cache = self.draft.new_cache(rows, max_length)
        weight = next(self.draft.parameters())
        hidden = self.draft.config.hidden_size
        self.fed_back_BH = torch.zeros(rows, hidden, dtype=weight.dtype, device=weight.device)
        self.normed_BH = torch.zeros_like(self.fed_back_BH)
        self.position_B = torch.zeros(rows, dtype=torch.int64, device=weight.device)

    def _step(self, hidden_SBH: Tensor, tokens_BS: Tensor, slots_BS: Tensor, first: int) -> tuple[Tensor, Tensor]:
        view = cache_rows.rows_view(self.cache, first, tokens_BS.shape[0])
        plan = AttentionPlan.cached(view, slots_BS)
        return self.draft.layer_step(
            hidden_SBH, self.base.embed(tokens_BS), slots_BS, lambda layer, q, k, v: attend(q, k, v, plan, layer)
        )

    def observe(self, seen: Observation) -> None:
        """Run the verified rows with their true features; keep the last one of each sequence."""
        hidden_SBH = self.draft.start(seen.captures_SBC, seen.state_SBH)
        fed_back_SBH, normed_SBH = self._step(hidden_SBH, seen.next_tokens_BS, seen.slots_BS, seen.first)
        batch = seen.counts_B.shape[0]
        row_B = torch.arange(batch, device=seen.counts_B.device)
        last_B = seen.counts_B - 1
        here = slice(seen.first, seen.first + batch)
        self.fed_back_BH[here] = fed_back_SBH[last_B, row_B]
        self.normed_BH[here] = normed_SBH[last_B, row_B]
        self.position_B[here] = seen.slots_BS[row_B, last_B]

    def prepare_draft_tokens(self, context: Context, count: int) -> tuple[Tensor, Tensor | None]:
        """See Drafter. Always proposes `count` tokens."""
        batch = context.lengths_B.shape[0]
        fed_back_SBH, normed_SBH = self.fed_back_BH[None, :batch], self.normed_BH[None, :batch]
        drafts = [self._token(normed_SBH)]
        for k in range(1, count):
            slots_BS = self.position_B[:batch, None] + k
            fed_back_SBH, normed_SBH = self._step(fed_back_SBH, drafts[-1][:, None], slots_BS, first=0)
            drafts.append(self._token(normed_SBH))
        return torch.stack(drafts, dim=1), None

    def _token(self, normed_SBH: Tensor) -> Tensor:
        id_B = sampling.argmax(self.draft.logits(normed_SBH, self.base)[0], self.group)
        return id_B if self.d2t_D is None else id_B + self.d2t_D[id_B]

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        cache_rows.move_rows(self.cache, source, target)
        for state in (self.fed_back_BH, self.normed_BH, self.position_B):
            state[target] = state[source]
