"""Drafting with a second, smaller model of the same tokenizer: the original form of speculative decoding.

With a KV cache of its own, the model reads the known tokens that it has not read yet, then generates the draft tokens.
Rejected ones are overwritten by the next proposal.

B rows of the running batch, S tokens per forward, K draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.base.schedule import run_base_everywhere
from megatron_spec.batch import Batch
from megatron_spec.config import UserError
from megatron_spec.decoding import sampling
from megatron_spec.decoding.cache import move_rows, rows_view
from megatron_spec.decoding.drafters.base import Context, Drafter, Observation, Proposal
from megatron_spec.ops.visibility import Visibility

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase

PROBES = (
    "Hello, world!",
    "def f(x):\n    return x ** 2  # square\n",
    "\u00fcber 3.14 \u2260 22/7 \U0001f600",
    "  a\tb\n\n",
)


class DraftTargetDrafter(Drafter):
    """Chains from a complete language model under the base's parallel layout."""

    def __init__(self, model: FrozenBase, base: FrozenBase) -> None:
        if model.config.max_position_embeddings < base.config.max_position_embeddings:
            raise UserError(
                f"the draft model has {model.config.max_position_embeddings} positions, the base "
                f"{base.config.max_position_embeddings}: choose a draft model with at least as many"
            )
        self.model, self.group = model, base.world.tp
        self.known = min(model.vocab_size, base.vocab_size)
        """Number of ids in both vocabularies; sizes may differ by rows without a token of the tokenizer (Qwen2.5)."""
        self.vocab_size = base.vocab_size

    def open(self, rows: int, max_length: int) -> None:
        """See Drafter."""
        self.cache = self.model.new_cache(rows, max_length)
        self.read = [0] * rows  # tokens of each row that the model has read

    def observe(self, seen: Observation) -> None:
        """A prefill resets its rows; tokens are read in `prepare_draft_tokens`."""
        if seen.prefill:
            count = seen.slots_BS.shape[0]
            self.read[seen.first : seen.first + count] = [0] * count

    def _logits(
        self, tokens_BS: Tensor, slots_BS: Tensor, last_B: Tensor, key_slots: int, lengths_B: Tensor,
        visible_BSL: Tensor | None,
    ) -> Tensor:  # fmt: skip
        zeros_BS = torch.zeros_like(tokens_BS, dtype=torch.int32)
        view = rows_view(self.cache, 0, tokens_BS.shape[0])
        visibility = Visibility.cached(view, slots_BS, visible_BSL, key_slots, lengths_B)
        _, state_SBH = run_base_everywhere(self.model, Batch(tokens_BS, slots_BS, zeros_BS, zeros_BS), visibility)
        rows = torch.arange(tokens_BS.shape[0], device=tokens_BS.device)
        logits_BV = self.model.logits(state_SBH[last_B, rows][None])[0]
        logits_BV[:, max(self.known - self.group.rank() * logits_BV.shape[1], 0) :] = float("-inf")
        return logits_BV

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        """See Drafter. Always proposes `count` tokens."""
        batch, lengths_B = context.lengths_B.shape[0], context.lengths_B
        S = max(length - read for length, read in zip(context.lengths, self.read, strict=False))
        # Rows with fewer unread tokens read some again, so that the last of the S tokens is the last known one.
        slots_BS = (lengths_B[:, None] - S + torch.arange(S, device=lengths_B.device)).clamp(min=0)
        last_B, visible_BSL = torch.full_like(lengths_B, S - 1), None
        if min(context.lengths) < S:  # some slots are not consecutive
            visible_BSL = torch.arange(context.key_slots, device=slots_BS.device) <= slots_BS[:, :, None]
        tokens_BS = context.tokens_BL.gather(1, slots_BS).clamp(max=self.known - 1)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for k in range(count):
            logits_BV = self._logits(tokens_BS, slots_BS, last_B, context.key_slots, lengths_B, visible_BSL)
            if context.uniform_BK is None:
                tokens.append(sampling.argmax(logits_BV, self.group))
            else:
                p_BV = sampling.probabilities(logits_BV / context.temperature, self.group)
                q.append(F.pad(p_BV, (0, self.vocab_size - p_BV.shape[1])))  # to the base's ids, or cut to them
                tokens.append(sampling.draw(q[-1], context.uniform_BK[:, k]))
            tokens_BS, slots_BS = tokens[-1][:, None], lengths_B[:, None] + k
            last_B, visible_BSL = torch.zeros_like(lengths_B), None
        self.read[:batch] = context.lengths
        return Proposal(torch.stack(tokens, dim=1), q_BNV=torch.stack(q, dim=1) if q else None)

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """See Drafter."""
        move_rows(source, target, [self.cache])
        for s, t in zip(source, target, strict=True):
            self.read[t] = self.read[s]


def check_tokenizers(base: Any, draft: Any, where: str) -> None:
    """Raise UserError unless both tokenizers give every token the same id: drafts are compared as ids."""
    ours, theirs = base.get_vocab(), draft.get_vocab()
    wrong = [t for t, i in ours.items() if theirs.get(t) != i]
    extra = [t for t in theirs if t not in ours]
    texts = [p for p in PROBES if base.encode(p, add_special_tokens=False) != draft.encode(p, add_special_tokens=False)]
    if wrong or extra or texts:
        found = (
            f"tokens with different ids: {len(wrong)} ({wrong[:3]})"
            if wrong
            else f"extra tokens: {len(extra)} ({extra[:3]})"
        )
        found = found if wrong or extra else f"the text {texts[0]!r} is split differently"
        raise UserError(
            f"--speculative-model {where}: its tokenizer differs from the base's ({found}); choose a model with the "
            "base's tokenizer"
        )
