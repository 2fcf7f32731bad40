"""EAGLE-1 (arXiv 2401.15077): predict the base's next final state from the current one and the next token.

Row j reads [embedding(t_{j+1}) ; f_j], with f the base's final state, and estimates f_{j+1}, from which the base's
frozen LM head computes logits. Trained by regression on f_{j+1} and on the base's distribution; with several draft
steps also on its own estimates (arXiv 2408.15766). EAGLE-2 uses the same weights with dynamic trees.

S sequence, B micro-batch, H hidden size, T draft steps, R supervised rows of a step, U teacher rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig
from megatron_spec.drafts.contract import Attention, BaseEnds, DraftLosses
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import Linear, Placement
from megatron_spec.drafts.randomness import mix
from megatron_spec.drafts.recurrent import SharedHeadDraft
from megatron_spec.drafts.unroll import Supervision, teacher_state
from megatron_spec.drafts.vocab import DraftVocab


class Eagle1Draft(SharedHeadDraft):
    """fc and layers.{i}: no input norm in the first layer, no final norm, the base's LM head."""

    draws = True

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        H = config.hidden_size
        self.fc = Linear(2 * H, H, place.in_high_precision, config.fc_bias)
        self.layers = nn.ModuleList(
            DraftLayer(config, False, place, input_norm=i > 0) for i in range(config.num_hidden_layers)
        )

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """See RecurrentDraft."""
        return list(self.layers)  # type: ignore[arg-type]

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """See RecurrentDraft. The estimated state is both fed back and the input of the LM head."""
        cos, sin = self.rotary(positions_BS, hidden_SBH, attention)
        embedding_SBH = embedding_SBH.to(hidden_SBH.dtype)
        hidden_SBH = self.fc(torch.cat([embedding_SBH, hidden_SBH], dim=-1))
        for i, layer in enumerate(self.decoder_layers):
            hidden_SBH = layer(hidden_SBH, embedding_SBH, cos, sin, attention, i)
        return hidden_SBH, hidden_SBH

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """feature_weight * SmoothL1 (mean over H) + token_weight * token loss, summed over supervised rows.

        `DraftLosses.loss_T` has the same sum per step.
        """
        hidden = self.start(features.captures_SBC, features.state_SBH)
        if self.training and torch.is_grad_enabled() and objective.feature_noise > 0:
            rows_L = features.batch.local(torch.arange(features.batch.tokens_BS.shape[1], device=hidden.device)[None])[
                0
            ]
            if self.sequence_parallel:
                rows_L = rows_L.chunk(self.tp_group.size())[self.tp_group.rank()]
            hidden = hidden + feature_noise(features.batch, hidden, objective.feature_noise, rows_L)
        token, states, plan, _ = self._token_losses(hidden, features, ends, objective)
        regression_T = self._regression(states, features, plan)
        regression = torch.stack([objective.decay**k * x for k, x in enumerate(regression_T)]).sum()
        # All tensor parallel ranks have the same states, whose gradients are summed over ranks: scale the gradient of
        # the regression by 1 / TP, but not its value.
        part = regression / self.tp_group.size()
        regression = part + (regression - part).detach()
        token.total = objective.token_weight * token.total + objective.feature_weight * regression
        token.loss_T = objective.token_weight * token.loss_T + objective.feature_weight * regression_T.detach()
        return token

    def _regression(self, states: list[Tensor], features: Features, plan: Supervision) -> Tensor:
        """[T] SmoothL1 between estimated and true states, mean over H, sum over the supervised rows."""
        true_UH = teacher_state(features, plan, self.tp_group, self.sequence_parallel)
        wide = torch.float64 if true_UH.dtype == torch.float64 else torch.float32
        return torch.stack([
            F.smooth_l1_loss(state.to(wide), true_UH[rows].to(wide), reduction="none").mean(-1).sum()
            for state, rows in zip(states, plan.teacher_rows, strict=True)
        ])  # fmt: skip


def feature_noise(batch: Batch, like_SBH: Tensor, scale: float, rows_L: Tensor | None = None) -> Tensor:
    """Noise [S, B, H], uniform in +-scale: a function of torch's seed, the tokens of the row, position and channel.

    Independent of device, padding and layout.

    Args:
        like_SBH: shape, dtype and device of the noise.
        rows_L: sequence positions of the rows, if not all (sequence or context parallelism).
    """
    H = like_SBH.shape[2]
    device = like_SBH.device
    place_S = torch.arange(batch.tokens_BS.shape[1], device=device)
    real_BS = batch.documents_BS >= 0
    content_B = (mix((batch.tokens_BS + 1) * 0x9E3779B1 + place_S) * real_BS).sum(1)
    seed_B = mix(content_B + mix(torch.initial_seed()))
    row_SB = mix(seed_B + (place_S if rows_L is None else rows_L)[:, None] * 0x85EBCA6B)
    bits_SBH = mix(row_SB[..., None] + torch.arange(H, device=device) * 0xC2B2AE35)
    unit_SBH = (bits_SBH >> 8).to(torch.float32) / (1 << 24)  # 24 bits: exact in fp32, [0, 1)
    return ((2 * unit_SBH - 1) * scale).to(like_SBH.dtype)
