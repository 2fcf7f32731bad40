"""Drafting with Medusa heads: head i proposes the token i positions after the next one, all from one base state.

A chain of the most likely token of every head, a fixed tree of head ranks (arXiv 2401.10774 section 2.1.2), or a tree
of the most likely combinations, treating the heads as independent.

B rows of the running batch, H base hidden size, N nodes, k tokens considered per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_spec.decoding import cache as cache_rows
from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal
from megatron_spec.decoding.drafters.grow import Level, grow
from megatron_spec.decoding.tree import paths_to_parents
from megatron_spec.drafts.medusa import MedusaDraft

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


class MedusaDrafter(Drafter):
    """The most likely token of every head, so at most as many tokens as heads. Keeps one base state per row."""

    fixed_shapes = True

    def __init__(self, draft: MedusaDraft, base: FrozenBase) -> None:
        self.draft, self.base = draft, base
        self.group, self.heads = base.world.tp, draft.config.num_heads

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        H, device = self.draft.config.hidden_size, self.base.world.device
        self.state_BH = torch.zeros(rows, H, dtype=self.base.dtype, device=device)

    def observe(self, seen: Observation) -> None:
        """Keep the state of the last verified row of each sequence."""
        batch = seen.counts_B.shape[0]
        row_B = torch.arange(batch, device=seen.counts_B.device)
        self.state_BH[seen.first : seen.first + batch] = seen.state_SBH[seen.counts_B - 1, row_B]

    def _logits(self, batch: int, head: int) -> Tensor:
        return self.draft.logits(self.state_BH[None, :batch], head, self.base)[0]

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter."""
        batch = context.lengths_B.shape[0]
        if context.uniform_BK is None:
            best = [sampling.argmax(self._logits(batch, i), self.group) for i in range(min(count, self.heads))]
            return Proposal(torch.stack(best, dim=1))
        q = [
            sampling.probabilities(self._logits(batch, i) / context.temperature, self.group)
            for i in range(min(count, self.heads))
        ]
        tokens = [sampling.draw(q_BV, context.uniform_BK[:, i]) for i, q_BV in enumerate(q)]
        return Proposal(torch.stack(tokens, dim=1), q_BNV=torch.stack(q, dim=1))

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        cache_rows.move_rows(source, target, states=[self.state_BH])


class MedusaChoicesDrafter(MedusaDrafter):
    """A fixed tree: path (r0, r1) is the token of rank r0 of head 0, then the token of rank r1 of head 1."""

    def __init__(self, draft: MedusaDraft, base: FrozenBase, paths: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(draft, base)
        self.parents, self.levels, self.ranks = paths_to_parents(paths)
        self.width = max(self.ranks) + 1
        device = base.world.device
        self.parents_N, self.levels_N, self.ranks_N = (
            torch.tensor(x, device=device) for x in (self.parents, self.levels, self.ranks)
        )

    def max_nodes(self, count: int) -> int:
        """See Drafter."""
        return len(self.parents)

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Nodes deeper than `count` are left out."""
        batch = context.lengths_B.shape[0]
        nodes = sum(level < count for level in self.levels)  # sorted by level
        deepest = max(self.levels[:nodes]) + 1
        top = torch.stack(
            [sampling.topk(self._logits(batch, i), self.width, self.group)[1] for i in range(deepest)], dim=1
        )
        tokens_BN = top[:, self.levels_N[:nodes], self.ranks_N[:nodes]]
        return Proposal(tokens_BN, None, self.parents_N[:nodes].expand(batch, -1))


class MedusaTreeDrafter(MedusaDrafter):
    """The `total` most likely combinations of the heads' tokens."""

    def __init__(self, draft: MedusaDraft, base: FrozenBase, width: int, total: int) -> None:
        super().__init__(draft, base)
        self.width, self.total = width, total

    def max_nodes(self, count: int) -> int:
        """See Drafter."""
        return self.total

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter."""
        batch, k = context.lengths_B.shape[0], self.width
        top = [sampling.top_log_probs(self._logits(batch, i), k, self.group) for i in range(min(count, self.heads))]

        def children(level: Level) -> tuple[Tensor, Tensor]:
            """The most likely tokens of the level's head, the same for every parent."""
            logp_Bk, ids_Bk = top[level.depth]
            return logp_Bk[:, None].expand(-1, k, -1), ids_Bk[:, None].expand(-1, k, -1)

        return grow(*top[0], len(top), self.total, children)
