"""Draft tokens from logits over the draft vocabulary.

B rows of the running batch, K draft tokens, D draft vocabulary, V vocabulary of the base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_spec.decoding import sampling
from megatron_spec.decoding.drafters.base import Context
from megatron_spec.drafts.vocab import DraftVocab

if TYPE_CHECKING:
    from megatron_spec.base.model import FrozenBase


class Choice:
    """Chooses draft tokens, as ids of the base's vocabulary: the most likely one, or a sample."""

    def __init__(self, vocab: DraftVocab, base: FrozenBase) -> None:
        self.group, self.vocab_size = base.world.tp, vocab.vocab_size
        self.target_D = None if vocab.is_full else vocab.target_ids.to(base.world.device)

    def __call__(self, logits_BD: Tensor, context: Context, k: int, q: list[Tensor]) -> Tensor:
        """Draft token k; if it is sampled, its distribution is appended to `q`."""
        if context.uniform_BK is None:
            return self.target(sampling.argmax(logits_BD, self.group))
        q.append(self._distribution(logits_BD, context.temperature))
        return sampling.draw(q[-1], context.uniform_BK[:, k])

    def target(self, id_: Tensor) -> Tensor:
        """Ids of the base's vocabulary for draft ids."""
        return id_ if self.target_D is None else self.target_D[id_]

    def _distribution(self, logits_BD: Tensor, temperature: float) -> Tensor:
        """float32 [B, V] over the base's vocabulary."""
        p_BD = sampling.probabilities(logits_BD / temperature, self.group)
        if self.target_D is None:
            return p_BD
        whole_BV = p_BD.new_zeros(p_BD.shape[0], self.vocab_size)
        return whole_BV.index_copy(1, self.target_D, p_BD[:, : len(self.target_D)])
