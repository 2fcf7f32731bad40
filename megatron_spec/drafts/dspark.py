"""DSpark (arXiv 2607.05147): DFlash's backbone with every slot trained, a Markov head and a confidence head.

Slot s predicts t_{a+1+s}. The Markov head adds W2 l to the logits. l is computed from m = W1[x], and x is the token
before the predicted one: the anchor for slot 0, else the true token in training, the drafted token in decoding.

- vanilla: l = m
- gated: l = sigmoid(gate_proj [state ; m]) * m
- rnn: (g, c, o) = joint_proj [memory ; m ; state], l = tanh(o), and the memory, 0 before the first slot, becomes
  sigmoid(g) memory + (1 - sigmoid(g)) tanh(c)

The confidence head, which a configuration may leave out, predicts the probability that the slot's token is accepted:
sigmoid(w [state ; m] + b), trained on 1 - TV.

W1 is split over the vocabulary like an embedding, W2 like an LM head; the rest is replicated.

R rows of a step, N rows of all steps, P blocks, H hidden size, V vocabulary, D draft vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.config import BlockConfig
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.block_losses import BlockHead
from megatron_spec.drafts.dflash import DFlashDraft
from megatron_spec.drafts.linear import Placement, VocabEmbedding, copy_to_ranks, pad_logits
from megatron_spec.drafts.vocab import DraftVocab


class Affine(nn.Module):
    """weight [outputs, inputs] and bias, replicated, with equal inputs on all tensor parallel ranks."""

    def __init__(self, inputs: int, outputs: int, place: Placement) -> None:
        super().__init__()
        self.weight, self.bias = place.replicated(outputs, inputs), place.replicated(outputs)

    def forward(self, *parts: Tensor) -> Tensor:
        """[N, outputs] from the concatenation of `parts` [N, ...]."""
        return F.linear(torch.cat(parts, -1), self.weight, self.bias)


class MarkovHead(nn.Module):
    """markov_w1 [V, r], an embedding, markov_w2 [D, r], and the layer between them."""

    def __init__(self, config: BlockConfig, place: Placement) -> None:
        super().__init__()
        self.markov_w1 = VocabEmbedding(config.vocab_size, config.markov_rank, place)
        # Not a linear of `linear.py`, which may be quantised: like the LM head, it stays in high precision.
        self.markov_w2 = nn.Module()
        self.markov_w2.weight = place.vocabulary(config.draft_vocab_size, config.markov_rank)
        self.kind, r, H = config.markov_head_type, config.markov_rank, config.hidden_size
        if self.kind == "gated":
            self.gate_proj = Affine(H + r, r, place)
        elif self.kind == "rnn":
            self.joint_proj = Affine(2 * r + H, 3 * r, place)

    def step(self, m_Nr: Tensor, states_NH: Tensor, memory_Nr: Tensor) -> tuple[Tensor, Tensor]:
        """(l, next memory), both [N, r], of one slot of N blocks; only rnn updates the memory."""
        if self.kind == "gated":
            return self.gate_proj(states_NH, m_Nr).sigmoid() * m_Nr, memory_Nr
        if self.kind == "rnn":
            keep, new, out = self.joint_proj(memory_Nr, m_Nr, states_NH).chunk(3, -1)
            keep = keep.sigmoid()
            return out.tanh(), keep * memory_Nr + (1 - keep) * new.tanh()
        return m_Nr, memory_Nr

    def steps(self, m: Sequence[Tensor], states: Sequence[Tensor], blocks: Sequence[Tensor], count: int) -> Tensor:
        """l [N, r] of the rows of all steps, step by step.

        Args:
            m, states: [R, r] and [R, H] of every step.
            blocks: int64 [R] block of every row, per step; a subset of those of the previous step.
            count: number of blocks.
        """
        if self.kind != "rnn":
            whole = torch.cat(list(m))
            return self.step(whole, torch.cat(list(states)), whole)[0]
        memory_Pr, found = m[0].new_zeros(count, m[0].shape[1]), []
        for m_Rr, states_RH, block_R in zip(m, states, blocks, strict=True):
            latent_Rr, memory_Rr = self.step(m_Rr, states_RH, memory_Pr[block_R])
            found.append(latent_Rr)
            memory_Pr = memory_Pr.index_copy(0, block_R, memory_Rr)
        return torch.cat(found)


class ConfidenceHead(nn.Module):
    """proj [1, H (+ r)] with a bias."""

    def __init__(self, inputs: int, place: Placement) -> None:
        super().__init__()
        self.proj = Affine(inputs, 1, place)


class DSparkDraft(DFlashDraft):
    """DFlash's parameters, markov_head and, unless it is left out, confidence_head."""

    def __init__(self, config: BlockConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        blocks = Placement(place.group, False, place.dtype, place.device)
        self.markov_head = MarkovHead(config, blocks)
        if config.has_confidence_head:
            inputs = config.hidden_size + (config.markov_rank if config.confidence_reads_markov else 0)
            self.confidence_head = ConfidenceHead(inputs, blocks)

    def markov(self, tokens_N: Tensor) -> Tensor:
        """[N, r] rows of W1, complete on every rank."""
        out: Tensor = self.markov_head.markov_w1(tokens_N[None])[:, 0]
        return out

    def markov_logits(self, latent_Nr: Tensor) -> Tensor:
        """[N, D / TP] correction of this rank's logits."""
        logits = latent_Nr @ self.markov_head.markov_w2.weight.t()  # type: ignore[operator]
        return pad_logits(logits, self.config.draft_vocab_size, self.tp_group)

    def confidence(self, states_NH: Tensor, m_Nr: Tensor) -> Tensor:
        """[N] logits of the probability that a slot's token is accepted, by the confidence head."""
        parts = [states_NH, m_Nr] if self.config.confidence_reads_markov else [states_NH]
        out: Tensor = self.confidence_head.proj(*parts)[:, 0]
        return out

    def block_head(self, states_NH: Tensor, weight_VH: Tensor, plan: BlockPlan) -> BlockHead:
        """See DFlashDraft."""
        m_Nr, counts = self.markov(plan.tokens_before()), [len(r) for r in plan.supervision.rows]
        blocks = [r // plan.slots for r in plan.supervision.rows]
        latent_Nr = self.markov_head.steps(m_Nr.split(counts), states_NH.split(counts), blocks, len(plan.tokens_P))
        head = super().block_head(states_NH, weight_VH, plan)
        head.low_Nr = copy_to_ranks(latent_Nr, self.tp_group)
        head.low_weight_Vr = self.markov_head.markov_w2.weight  # type: ignore[assignment]
        if self.config.has_confidence_head:  # as in the paper, its loss also trains the backbone
            head.confidence_N = self.confidence(states_NH, m_Nr)
        return head
