"""Chain drafting with Medusa heads: head i proposes the token i places behind the next one, from one base state.

B rows of the running batch, H base hidden size, K draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.base import Context, Observation
from megatron_spec.drafts.medusa import MedusaDraft

if TYPE_CHECKING:
    from megatron_spec.pipeline.model import FrozenBase


class MedusaDrafter:
    """The best token of every head; never more tokens than heads. Remembers one base state a row."""

    def __init__(self, draft: MedusaDraft, base: FrozenBase) -> None:
        self.draft, self.base = draft, base

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        H, device = self.draft.config.hidden_size, self.base.world.device
        self.state_BH = torch.zeros(rows, H, dtype=self.base.dtype, device=device)

    def observe(self, seen: Observation) -> None:
        """Keep the state of the last verified row of each sequence."""
        batch = seen.counts_B.shape[0]
        row_B = torch.arange(batch, device=seen.counts_B.device)
        self.state_BH[seen.first : seen.first + batch] = seen.state_SBH[seen.counts_B - 1, row_B]

    def prepare_draft_tokens(self, context: Context, count: int) -> tuple[Tensor, Tensor | None]:
        """See Drafter."""
        batch = context.lengths_B.shape[0]
        heads = min(count, self.draft.config.num_heads)
        state_SBH = self.state_BH[None, :batch]
        drafts_BK = context.lengths_B.new_zeros(batch, count)
        for i in range(heads):
            logits_BV = self.draft.logits(state_SBH, i, self.base)[0]
            drafts_BK[:, i] = sampling.argmax(logits_BV, self.base.world.tp)
        return drafts_BK, torch.full_like(context.lengths_B, heads)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        self.state_BH[target] = self.state_BH[source]
