"""Blocks of a micro-batch: anchors, visibility and supervision of the slots.

A block of C slots starts at anchor row a. Step k (from 0) predicts t_{a+1+k} and is compared with the base's logits
z_{a+k}. It is supervised if t_a .. t_{a+1+k} lie in one assistant turn, as in serving.

P blocks, C slots of a block, T steps, S sequence, B micro-batch, U teacher rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spec.batch import Batch
from megatron_spec.config import BlockConfig
from megatron_spec.drafts.contract import shift
from megatron_spec.drafts.randomness import mix
from megatron_spec.drafts.unroll import Supervision
from megatron_spec.ops.block_attention import BlockLayout
from megatron_spec.ops.head import whole_chunks
from megatron_spec.runtime.platform import to_device


def document_keys(batch: Batch) -> tuple[Tensor, Tensor]:
    """(index of each token's document in the batch, 32 random bits per token), both int64 [B, S].

    The bits depend on torch's seed, the content of the document and the position in it.
    """
    B, S = batch.tokens_BS.shape
    documents = batch.documents_BS.long()
    group_BS = documents.clamp(min=0) + torch.arange(B, device=documents.device)[:, None] * (S + 1)
    group_BS = torch.where(documents < 0, S, group_BS)  # padding: a document of its own
    bits = mix((batch.tokens_BS + 1) * 0x9E3779B1 + batch.positions_BS)
    content = bits.new_zeros(B * (S + 1)).index_add_(0, group_BS.flatten(), bits.flatten())
    seed = mix(mix(content) + mix(torch.initial_seed()))
    return group_BS, mix(seed[group_BS] + batch.positions_BS * 0x85EBCA6B)


def draw(eligible_BS: Tensor, batch: Batch, most: int) -> Tensor:
    """bool [B, S]: a random choice of at most `most` eligible tokens per document."""
    group_BS, key_BS = document_keys(batch)
    place_E = eligible_BS.flatten().nonzero()[:, 0]
    group_E, key_E = group_BS.flatten()[place_E], key_BS.flatten()[place_E]
    order = key_E.argsort(stable=True)
    order = order[group_E[order].argsort(stable=True)]
    sorted_E = group_E[order]
    first = torch.searchsorted(sorted_E, sorted_E)
    kept = order[torch.arange(len(order), device=order.device) - first < most]
    chosen = torch.zeros_like(eligible_BS).flatten()
    chosen[place_E[kept]] = True
    return chosen.view_as(eligible_BS)


def supervised_slots(batch: Batch, steps: int) -> Tensor:
    """bool [T, B, S]: step k of a block anchored at a is supervised."""
    turns, documents = batch.turns_BS, batch.documents_BS
    same = (turns > 0) & (documents >= 0)
    found = []
    for k in range(1, steps + 1):
        same = same & (shift(turns, k, 1) == turns) & (shift(documents, k, 1, fill=-1) == documents)
        found.append(same)
    return torch.stack(found)


@dataclass
class BlockPlan:
    """The blocks of one micro-batch on this rank, ordered by sequence, then by anchor.

    Attributes:
        tokens_P: int64 token of each anchor.
        positions_P: int64 rotary position of each anchor.
        layout: context rows that the slots see, as indices into [B * S].
        supervision: rows are indices into [P * C]; `active` is unused.
        tokens_U, labels_U: int64 [U] token of the text at each teacher row, and the next token.
        slots: C, slots per block.
        counts_P: supervised steps of each block, its first ones; on the host if the batch has a host copy.
    """

    tokens_P: Tensor
    positions_P: Tensor
    layout: BlockLayout
    supervision: Supervision
    tokens_U: Tensor
    labels_U: Tensor
    slots: int
    counts_P: Tensor

    def by_block(self, most: int) -> tuple[Tensor, list[slice]]:
        """(order [N] that puts the supervised rows of all steps block by block, chunks of so ordered rows).

        A chunk has whole blocks, of at most `most` rows together unless one block has more.
        """
        return torch.cat(self.supervision.rows).argsort(), whole_chunks(self.counts_P.cpu(), most)

    def tokens_before(self) -> Tensor:
        """[N] token before the predicted one, for the supervised rows of all steps."""
        return self.tokens_U[torch.cat(self.supervision.teacher_rows)]

    def places(self) -> tuple[Tensor, Tensor]:
        """(block, step) of the supervised rows of all steps."""
        rows = self.supervision.rows
        step_N = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])
        return torch.cat(rows) // self.slots, step_N

    @staticmethod
    def of(batch: Batch, config: BlockConfig, most: int) -> BlockPlan:
        """Draw the anchors. Computed on the host if the batch has a host copy."""
        plan = BlockPlan._of(batch.host or batch, config, most)
        return plan if batch.host is None else plan._to(batch.tokens_BS.device)

    @staticmethod
    def _of(batch: Batch, config: BlockConfig, most: int) -> BlockPlan:
        B, S = batch.tokens_BS.shape
        mask_TBS = supervised_slots(batch, config.num_steps)
        chosen_BS = draw(mask_TBS[0], batch, most)
        if batch.context is not None:
            mine_S = torch.zeros(S, dtype=torch.bool, device=chosen_BS.device)
            mine_S[batch.context.rows(S, chosen_BS.device)] = True
            chosen_BS = chosen_BS & mine_S
        anchor_P = chosen_BS.flatten().nonzero()[:, 0]  # b * S + a
        positions_P = batch.positions_BS.flatten()[anchor_P]
        rows, wanted = [], []
        for k in range(config.num_steps):
            block = mask_TBS[k].flatten()[anchor_P].nonzero()[:, 0]
            rows.append(block * config.block_size + config.first_slot + k)
            place = anchor_P[block]
            wanted.append((place % S + k) * B + place // S)  # teacher rows are indices into [S * B]
        needed = torch.zeros(S * B, dtype=torch.bool, device=anchor_P.device)
        for r in wanted:
            needed[r] = True
        place = needed.cumsum(0) - 1
        teacher_U = needed.nonzero()[:, 0]
        supervision = Supervision(rows, [], [place[r] for r in wanted], teacher_U)
        layout = BlockLayout(anchor_P - positions_P, anchor_P, config.causal, config.sliding_window)
        tokens_U, labels_U = (shift(batch.tokens_BS, k, 1).t().flatten()[teacher_U] for k in (0, 1))
        tokens_P = batch.tokens_BS.flatten()[anchor_P]
        counts_P = mask_TBS.flatten(1)[:, anchor_P].sum(0)
        return BlockPlan(tokens_P, positions_P, layout, supervision, tokens_U, labels_U, config.block_size, counts_P)

    def _to(self, device: torch.device) -> BlockPlan:
        """Copy all indices to a device, in one transfer."""
        plan, layout = self.supervision, self.layout
        blocks = [self.tokens_P, self.positions_P, layout.first_P, layout.anchor_P]
        single = [*blocks, self.tokens_U, self.labels_U, plan.teacher_U]
        flat = [*single, *plan.rows, *plan.teacher_rows]
        moved = list(to_device(torch.cat(flat), device).split([len(x) for x in flat]))
        tokens, positions, first, anchor, before, labels, teacher = moved[:7]
        steps = len(plan.rows)
        supervision = Supervision(moved[7 : 7 + steps], [], moved[7 + steps :], teacher)
        layout = BlockLayout(first, anchor, layout.causal, layout.window)
        return BlockPlan(tokens, positions, layout, supervision, before, labels, self.slots, self.counts_P)
