"""DFlash and DSpark drafting: one forward proposes a block.

The drafter caches keys and values of the context: every observation adds those of the verified rows, computed from the
base's captures. A proposal runs a block anchored at the last known token, at position a. Keys and values of its slots
are written after the context, to cache slots a .. a + C - 1, where the next observation or proposal overwrites them, so
rollback is free. Every slot has the visibility of training (`ops/block_attention.py`).

DFlash's tokens are independent of each other given the text. DSpark's are chosen from left to right, each with the
Markov head's correction for the token before it, and a block is truncated where the product of confidences falls below
a threshold.

B rows of the running batch, S rows of one observation, C slots of a block, K proposed tokens, L cache slots read, H
hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.decoding import cache as cache_rows
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal, in_one
from megatron_spec.decoding.drafters.choice import Choice
from megatron_spec.drafts.dflash import DFlashDraft
from megatron_spec.drafts.dspark import DSparkDraft
from megatron_spec.ops.attention import attend
from megatron_spec.ops.visibility import Visibility

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


class BlockDrafter(Drafter):
    """DFlash: the most likely token of every slot, or a sample."""

    fixed_shapes = True

    def __init__(self, draft: DFlashDraft, base: FrozenBase, most: int) -> None:
        config = draft.config
        if most > config.num_steps:
            raise UserError(
                f"--max-draft-len {most}, but the draft proposes blocks of {config.num_steps} tokens: give at most "
                f"{config.num_steps}"
            )
        self.draft, self.base, self.config = draft, base, config
        self.choose = Choice(draft.vocab, base)

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.cache = self.draft.new_cache(rows, max_length + self.config.block_size)

    def observe(self, seen: Observation) -> None:
        """Cache keys and values of the verified rows in every layer."""
        context_SBH = self.draft.context(seen.captures_SBC)
        rotation = self.draft.rotation(seen.slots_BS.t(), context_SBH)
        view = cache_rows.rows_view(self.cache, seen.first, seen.slots_BS.shape[0])
        places = view.places(seen.slots_BS)
        for i, layer in enumerate(self.draft.decoder_layers):
            keys, values = layer.self_attn.keys_values(context_SBH, rotation)
            view.write(i, keys, values, places)

    def _visible(self, anchor_B: Tensor, length: int, causal: bool, window: int | None) -> Tensor:
        """bool [B, C, L]: the cache slots that each slot of the blocks sees in layers of one mask."""
        place_BC = anchor_B[:, None] + torch.arange(self.config.block_size, device=anchor_B.device)
        last_BC = place_BC if causal else place_BC[:, -1:].expand_as(place_BC)
        rows_L = torch.arange(length, device=anchor_B.device)
        seen = rows_L <= last_BC[:, :, None]
        if window is not None:
            seen = seen & (rows_L > place_BC[:, :, None] - window)
        return seen

    def _states(self, context: Context) -> tuple[Tensor, Tensor]:
        """([B, C, H] inputs of the LM head for the block of every row, int64 [B] last known token)."""
        anchor_B = context.lengths_B - 1
        token_B = context.tokens_BL.gather(1, anchor_B[:, None])[:, 0]
        state_BCH = self.draft.block_embedding(token_B, self.base)
        length = context.key_slots + self.config.block_size
        view = cache_rows.rows_view(self.cache, 0, len(token_B))
        slots_BC = anchor_B[:, None] + torch.arange(self.config.block_size, device=anchor_B.device)
        masks = [self.config.mask_of(i) for i in range(self.config.num_hidden_layers)]
        seen = {
            mask: Visibility.cached(view, slots_BC, self._visible(anchor_B, length, *mask), length)
            for mask in dict.fromkeys(masks)
        }

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attention of the block's slots over the cache."""
            found = attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen[masks[layer]], layer)
            return in_one(found.transpose(0, 1))

        rotation = self.draft.block_rotation(anchor_B, state_BCH)
        return self.draft.run_layers(state_BCH, rotation, attention), token_B

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter."""
        states_BCH, _ = self._states(context)
        first = self.config.first_slot
        logits_KBV = self.draft.logits(in_one(states_BCH[:, first : first + count].transpose(0, 1)), self.base)
        q: list[Tensor] = []
        tokens = [self.choose(logits_BV, context, k, q) for k, logits_BV in enumerate(logits_KBV)]
        return Proposal(torch.stack(tokens, dim=1), q_BNV=torch.stack(q, dim=1) if q else None)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        cache_rows.move_rows(source, target, [self.cache])


class DSparkDrafter(BlockDrafter):
    """DSpark: tokens from left to right, truncated where the confidence is too low."""

    def __init__(self, draft: DSparkDraft, base: FrozenBase, most: int, threshold: float) -> None:
        super().__init__(draft, base, most)
        self.markov_draft, self.threshold = draft, threshold

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter."""
        draft = self.markov_draft
        states_BCH, token_B = self._states(context)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        sure_B = torch.ones_like(token_B, dtype=torch.float32)
        proposed_B = torch.zeros_like(token_B)
        memory_Br = states_BCH.new_zeros(len(token_B), self.config.markov_rank)
        for k in range(count):
            state_BH, m_Br = states_BCH[:, k], draft.markov(tokens[-1] if tokens else token_B)
            latent_Br, memory_Br = draft.markov_head.step(m_Br, state_BH, memory_Br)
            logits_BV = draft.logits(state_BH[None], self.base)[0] + draft.markov_logits(latent_Br)
            tokens.append(self.choose(logits_BV, context, k, q))
            if self.threshold > 0:
                sure_B = sure_B * draft.confidence(state_BH, m_Br).float().sigmoid()
                proposed_B = proposed_B + (sure_B >= self.threshold)
        return Proposal(
            torch.stack(tokens, dim=1),
            proposed_B if self.threshold > 0 else None,
            q_BNV=torch.stack(q, dim=1) if q else None,
        )
