"""P-EAGLE (arXiv 2602.01469): EAGLE-3 with parallel draft steps (docs/algorithms.md#p-eagle).

Row j at depth 0 reads [embedding(t_{j+1}) ; fc(captures of row j)], as in EAGLE-3. At depth d >= 1 it reads
[embedding(mask token) ; fc(m)] at rotary position j + d, where m is one learned vector, the parameter `mask_hidden`. It
sees the depth-0 rows <= j of its document, and row j at depths 1 to d: the trunk and branches of the training-time test
(`ops/ttt_attention.py`). Depth d has the targets of step d of EAGLE-3.

Each further depth trains on a random share `ObjectiveConfig.kept_share` of the previous depth's rows. Only rows that
some loss reads are computed.

S sequence, B micro-batch, T depths, H draft hidden size, R rows of a depth, TP tensor parallel size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig
from megatron_spec.drafts.anchors import document_keys
from megatron_spec.drafts.contract import BaseEnds, shift
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.linear import Placement
from megatron_spec.drafts.unroll import Supervision, head_rows
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops.ttt_attention import TrainingTimeTest
from megatron_spec.ops.visibility import Visibility


def kept_rows(batch: Batch, objective: ObjectiveConfig) -> Tensor:
    """bool [T, B, S]: rows that each depth trains on.

    A function of torch's seed, the document and the position in it, so equal in every layout.
    """
    _, key_BS = document_keys(batch)
    shares = [objective.kept_share(d) for d in range(objective.ttt_steps)]
    return torch.stack([key_BS < round(share * (1 << 32)) for share in shares])


def computed_rows(active: list[Tensor], total: int, ranks: int) -> list[Tensor]:
    """Rows to compute at each depth >= 1, ascending: the active ones.

    Under sequence parallelism, idle rows from the previous depth pad their number to a multiple of `ranks`.
    """
    before, found = torch.arange(total, device=active[0].device), []
    for rows in active[1:]:
        short = -len(rows) % ranks
        if short:
            idle = before[~torch.isin(before, rows)][:short]
            rows = torch.cat([rows, idle]).sort().values
        found.append(rows)
        before = rows
    return found


class PEagleDraft(EagleDraft):
    """EAGLE-3's parameters and `mask_hidden`, which replaces captures that the base has not computed yet."""

    draws = True

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        self.mask_hidden = place.replicated(1, 1, len(config.capture_layer_ids) * config.target_hidden_size)

    @property
    def mask_token(self) -> int:
        """Input token of every row at depths >= 1."""
        assert self.config.mask_token_id is not None  # `EagleConfig.validate`
        return self.config.mask_token_id

    def masked_inputs(self, ends: BaseEnds) -> tuple[Tensor, Tensor]:
        """(feature, embedding), both [1, 1, H]: the inputs of every row at depths >= 1."""
        ranks = self.tp_group.size() if self.sequence_parallel else 1
        tokens_BS = torch.full((1, ranks), self.mask_token, device=self.mask_hidden.device)
        return self.project(self.mask_hidden), self.embed(tokens_BS, ends)

    def supervision(self, batch: Batch, objective: ObjectiveConfig) -> Supervision:
        """See EagleDraft; rows are dropped only in training."""
        training = self.training and torch.is_grad_enabled()
        kept = functools.partial(kept_rows, objective=objective) if training else None
        return Supervision.of(batch, objective.ttt_steps, objective.alignment, kept)

    def states(self, features: Features, plan: Supervision, ends: BaseEnds, objective: ObjectiveConfig) -> list[Tensor]:
        """See EagleDraft. Depth by depth, each through all layers."""
        batch, group, scattered = features.batch, self.tp_group, self.sequence_parallel
        hidden_SBH = self.project(features.captures_SBC)
        attention = TrainingTimeTest(Visibility.of(batch), window=self.config.sliding_window)
        tokens_BS, positions_BS = batch.local(shift(batch.tokens_BS, 1, 1)), batch.local(batch.positions_BS)
        _, normed_SBH = self.layer_step(hidden_SBH, self.embed(tokens_BS, ends), positions_BS, attention)
        found = [head_rows(normed_SBH, plan.rows[0], group, scattered)]
        feature, embedding = self.masked_inputs(ends)
        ranks = group.size() if scattered else 1
        positions_N, before = batch.positions_BS.t().flatten(), None
        for d, rows in enumerate(computed_rows(plan.active, tokens_BS.numel(), ranks), start=1):
            if not len(rows):  # rows are nested: there are none at later depths either
                found += [feature[0, :0]] * (len(plan.rows) - d)
                break
            attention.compact(rows, None if before is None else torch.searchsorted(before, rows))
            feature_R1H, embedding_R1H = (x.expand(len(rows) // ranks, -1, -1) for x in (feature, embedding))
            positions_1R = positions_N[batch.whole_rows(rows)][None] + d
            _, normed_R1H = self.layer_step(feature_R1H, embedding_R1H, positions_1R, attention)
            found.append(head_rows(normed_R1H, torch.searchsorted(rows, plan.rows[d]), group, scattered))
            before = rows
        return found
