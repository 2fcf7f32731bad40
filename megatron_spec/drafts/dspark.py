"""DSpark (arXiv 2607.05147): DFlash's backbone with every slot trained, a Markov head and a confidence head.

Slot s predicts t_{a+1+s}. The Markov head adds W2 W1[x] to its logits, x the token before the predicted one: the anchor
for slot 0, the true token in training, the token just drafted in decoding. The confidence head tells how likely the
slot's token is accepted: sigmoid(w [state ; W1[x]] + b), trained on 1 - TV.

W1 is split over the vocabulary like an embedding, W2 like a head.

R rows of a step, N rows of all steps, H hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import BlockConfig
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.block_losses import BlockHead
from megatron_spec.drafts.dflash import DFlashDraft
from megatron_spec.drafts.linear import Placement, VocabEmbedding, copy_to_ranks, pad_logits
from megatron_spec.drafts.vocab import DraftVocab


class MarkovHead(nn.Module):
    """markov_w1 [V, r], a lookup, and markov_w2 [V, r]."""

    def __init__(self, config: BlockConfig, place: Placement) -> None:
        super().__init__()
        self.markov_w1 = VocabEmbedding(config.vocab_size, config.markov_rank, place)
        # No linear of `linear.py`: it stays in high precision, as the head whose logits it is added to.
        self.markov_w2 = nn.Module()
        self.markov_w2.weight = place.vocabulary(config.vocab_size, config.markov_rank)


class ConfidenceHead(nn.Module):
    """proj [1, H (+ r)] with a bias; replicated, and computed alike on every rank."""

    def __init__(self, inputs: int, place: Placement) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.weight, self.proj.bias = place.replicated(1, inputs), place.replicated(1)

    def forward(self, x_NX: Tensor) -> Tensor:
        """[N] logits."""
        return F.linear(x_NX, self.proj.weight, self.proj.bias)[:, 0]  # type: ignore[arg-type]


class DSparkDraft(DFlashDraft):
    """DFlash's parameters, markov_head and confidence_head."""

    def __init__(self, config: BlockConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        blocks = Placement(place.group, False, place.dtype, place.device)
        self.markov_head = MarkovHead(config, blocks)
        inputs = config.hidden_size + (config.markov_rank if config.confidence_reads_markov else 0)
        self.confidence_head = ConfidenceHead(inputs, blocks)

    def markov(self, tokens_N: Tensor) -> Tensor:
        """[N, r] W1 of some tokens, complete on every rank."""
        out: Tensor = self.markov_head.markov_w1(tokens_N[None])[:, 0]
        return out

    def markov_logits(self, markov_Nr: Tensor) -> Tensor:
        """[N, V / TP] what is added to this rank's logits."""
        logits = markov_Nr @ self.markov_head.markov_w2.weight.t()  # type: ignore[operator]
        return pad_logits(logits, self.config.vocab_size, self.tp_group)

    def confidence(self, states_NH: Tensor, markov_Nr: Tensor) -> Tensor:
        """[N] logits of the probability that a slot's token is accepted."""
        parts = [states_NH, markov_Nr] if self.config.confidence_reads_markov else [states_NH]
        out: Tensor = self.confidence_head(torch.cat(parts, -1))
        return out

    def block_head(self, rows: list[Tensor], weight_VH: Tensor, plan: BlockPlan) -> BlockHead:
        """See DFlashDraft."""
        markov_Nr = self.markov(plan.tokens_before())
        head = super().block_head(rows, weight_VH, plan)
        head.low_Nr = copy_to_ranks(markov_Nr, self.tp_group)
        head.low_weight_Vr = self.markov_head.markov_w2.weight  # type: ignore[assignment]
        # The paper trains the confidence on what the slot knows: its gradient also reaches the backbone.
        head.confidence_N = self.confidence(torch.cat(rows), markov_Nr)
        return head
