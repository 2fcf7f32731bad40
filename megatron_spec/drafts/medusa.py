"""Medusa-1 (arXiv 2401.10774): heads on the base's final state, each predicting one token further ahead.

Head i (from 0) predicts t_{j+2+i} from the state x of row j: logits_i = W2_i(x + SiLU(W1_i x + b_i)), with one or
several such residual blocks. W1 and b are initialised with zeros, W2 with the base's LM head, so every head starts as
the base's. The steps of `DraftLosses` are heads here.

The blocks are replicated. They run only on the supervised rows, gathered under sequence parallelism, so every tensor
parallel rank has their full gradients; W2 is split over the vocabulary.

S sequence, B micro-batch, H base hidden size, V vocabulary, R supervised rows of a head, TP tensor parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import MedusaConfig, ObjectiveConfig, UserError
from megatron_spec.drafts.as_built import head_weight
from megatron_spec.drafts.contract import BaseEnds, Draft, DraftLosses, shift
from megatron_spec.drafts.initial import initial_values, set_parameters
from megatron_spec.drafts.linear import Linear, Placement, VocabLinear, copy_to_ranks, enter, pad_logits
from megatron_spec.drafts.teacher import TeacherHead, teacher_of
from megatron_spec.drafts.unroll import Supervision, head_losses, teach
from megatron_spec.drafts.vocab import DraftVocab


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int, place: Placement) -> None:
        super().__init__()
        self.linear = Linear(size, size, place, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """The blocks of one head, and its output matrix unless it shares the base's LM head."""

    def __init__(self, config: MedusaConfig, place: Placement) -> None:
        super().__init__()
        H = config.hidden_size
        self.blocks = nn.Sequential(*(ResidualBlock(H, place) for _ in range(config.num_layers)))
        self.lm_head: VocabLinear | None = None
        if not config.share_base_head:
            self.lm_head = VocabLinear(H, config.vocab_size, place)


class MedusaDraft(Draft):
    """The Medusa heads of one rank. Every parameter is NaN until `initialize` or a checkpoint sets it."""

    def __init__(self, config: MedusaConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__()
        if not vocab.is_full or len(vocab) != config.vocab_size:
            raise UserError(
                f"Medusa heads predict the whole vocabulary of {config.vocab_size} tokens, found a draft vocabulary of "
                f"{len(vocab)} of {vocab.vocab_size}: convert without --draft-vocab"
            )
        self.config, self.vocab = config, vocab
        self.tp_group, self.sequence_parallel = place.group, place.sequence_parallel
        # Under sequence parallelism, too, a head reads the full sequence: its gradients are not partial.
        whole = replace(place, sequence_parallel=False)
        self.heads = nn.ModuleList(MedusaHead(config, whole) for _ in range(config.num_heads))
        self._teacher: TeacherHead | None = None

    def initialize(
        self, ends: BaseEnds, base_layer_tensors: Mapping[str, Tensor] | None = None, seed: int = 1234
    ) -> None:
        """Initialise every head to the base's LM head, without randomness. Collective."""
        set_parameters(self, initial_values(self, ends, {}, seed), self.tp_group)

    def teacher_head(self, ends: BaseEnds) -> TeacherHead:
        """The base's LM head, prepared on first use, which is a collective."""
        return teacher_of(self, ends)

    def logits(self, state_SBH: Tensor, head: int, ends: BaseEnds) -> Tensor:
        """[S, B, V / TP] logits of one head from final states (complete on every tensor parallel rank)."""
        module: MedusaHead = self.heads[head]  # type: ignore[assignment]
        x = module.blocks(state_SBH.to(next(self.parameters()).dtype))
        if module.lm_head is None:
            return pad_logits(x @ self.teacher_head(ends).draft_rows().t(), len(self.vocab), self.tp_group)
        out: Tensor = module.lm_head(x)
        return out

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Losses of every head. `hard_ce` compares with the tokens of the data, every other loss with the base.

        Raises UserError unless objective.ttt_steps is the number of heads (as set by `presets.objective_for`).
        """
        heads, group, teacher_head = self.config.num_heads, self.tp_group, self.teacher_head(ends)
        if objective.ttt_steps != heads:
            raise UserError(f"ttt_steps is {objective.ttt_steps}, but the draft has {heads} Medusa heads: use {heads}")
        plan = Supervision.of(features.batch, heads, objective.alignment)
        teacher = teach(features, plan, teacher_head, objective.temperature, group, self.sequence_parallel)
        with torch.no_grad():
            state_NH = enter(features.state_SBH, group, self.sequence_parallel).flatten(0, 1)
        labels = following_tokens(features.batch)[plan.teacher_U] if objective.loss_kind == "hard_ce" else None
        plain = objective.replace(step_decay=1.0)
        found = []
        for i, head in enumerate(self.heads):
            x = state_NH[plan.rows[i]].to(head.blocks[0].linear.weight.dtype)  # type: ignore[index,union-attr]
            x = copy_to_ranks(head.blocks(x), group)  # type: ignore[operator]
            weight = teacher_head.draft_rows()
            if head.lm_head is not None:
                x, weight = head.lm_head.quantized_input(x), head_weight(head.lm_head)  # type: ignore[union-attr,operator]
            one = slice(i, i + 1)
            mine = Supervision(
                plan.rows[one], plan.active[one], plan.teacher_rows[one], plan.teacher_U, plan.rejected[one]
            )
            found.append(head_losses([x], weight, mine, teacher, plain, group, labels, self.paths, self.row_loss))
        total = torch.stack([objective.decay**i * losses.total for i, losses in enumerate(found)]).sum()
        loss, correct, overlap, rows = (
            torch.cat([getattr(x, n) for x in found]) for n in ("loss_T", "correct_T", "overlap_T", "rows_T")
        )
        return DraftLosses(total, loss, correct, overlap, rows, found[0].counted)


def following_tokens(batch: Batch) -> Tensor:
    """int64 [S * B] token after each row."""
    return shift(batch.tokens_BS, 1, 1).t().flatten()
