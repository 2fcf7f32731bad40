"""P-EAGLE drafting: one forward proposes all tokens (docs/algorithms.md#p-eagle).

The verified rows run with true features and, in the same forward, a masked row for every token after the first: row i
of an observation with c final rows is a true row for i < c, else the masked row of depth i - c + 1. Rows have
consecutive positions and cache slots and see every slot up to their own, so a masked row sees the true rows and the
lower depths, as in training. The next observation starts at the slot of the first masked row and overwrites the masked
rows, so rollback is free.

B rows of the running batch, S rows of one observation, X rows of one forward, K proposed tokens, H draft hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.decoding import cache as cache_rows
from megatron_spec.decoding.drafters.base import Context, Observation, Proposal, in_one
from megatron_spec.decoding.drafters.eagle import EagleDrafter
from megatron_spec.drafts.peagle import PEagleDraft
from megatron_spec.ops.visibility import Visibility

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


class PEagleDrafter(EagleDrafter):
    """Chains of up to `most` tokens, from the forward that reads the verified rows."""

    def __init__(self, draft: PEagleDraft, base: FrozenBase, most: int) -> None:
        super().__init__(draft, base)
        self.parallel_draft, self.most = draft, most

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.cache = self.draft.new_cache(rows, max_length + self.most)
        weight = self.parallel_draft.mask_hidden
        size = (rows, self.most, self.draft.config.hidden_size)
        self.states_BKH = torch.zeros(size, dtype=weight.dtype, device=weight.device)

    def observe(self, seen: Observation) -> None:
        """Run the verified rows with true features and the masked rows after them; keep the inputs of the LM head."""
        draft, more = self.parallel_draft, self.most - 1
        S, device = seen.slots_BS.shape[1], seen.slots_BS.device
        slots_BX = torch.cat([seen.slots_BS, seen.slots_BS[:, -1:] + 1 + torch.arange(more, device=device)], 1)
        true_BX = torch.arange(S + more, device=device) < seen.counts_B[:, None]
        feature_SBH = F.pad(draft.project(seen.captures_SBC), (0, 0, 0, 0, 0, more))
        hidden_XBH = torch.where(true_BX.t()[..., None], feature_SBH, draft.project(draft.mask_hidden))
        tokens_BX = torch.where(true_BX, F.pad(seen.next_tokens_BS, (0, more)), draft.mask_token)
        if seen.prefill:
            view = cache_rows.rows_view(self.cache, seen.first, len(slots_BX))
            visibility = Visibility.prefill(view, slots_BX)
        else:
            visibility = self._earlier(slots_BX, seen.first, seen.key_slots + more)
        _, normed_XBH = self._step(hidden_XBH, tokens_BX, slots_BX, visibility)
        row_B = torch.arange(len(slots_BX), device=device)
        place_BK = seen.counts_B[:, None] - 1 + torch.arange(self.most, device=device)
        self.states_BKH[seen.first : seen.first + len(slots_BX)] = normed_XBH[place_BK, row_B[:, None]]

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Always proposes `count` tokens, at most `most`."""
        assert count <= self.most, (count, self.most)
        states_KBH = in_one(self.states_BKH[: context.lengths_B.shape[0], :count].transpose(0, 1))
        q: list[Tensor] = []
        logits_KBD = self.draft.logits(states_KBH, self.base)
        tokens = [self.choose(logits_BD, context, k, q) for k, logits_BD in enumerate(logits_KBD)]
        return Proposal(torch.stack(tokens, dim=1), q_BNV=torch.stack(q, dim=1) if q else None)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        cache_rows.move_rows(source, target, [self.cache], [self.states_BKH])
