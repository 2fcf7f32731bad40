"""Multi-token prediction as a draft (DeepSeek-V3, arXiv 2412.19437): one module, applied at every draft step.

Row j projects [norm(embedding(t_{j+1})) ; norm(h_j)] to H, runs one decoder layer of the base's architecture, a final
norm and the base's frozen LM head. At step 0, h is the base's final state; later, the draft's state before its final
norm (after it with `norm_output`). Steps, supervised rows and losses are those of EAGLE-3.

Parameters have DeepSeek-V3's names, with layers numbered from 0:
layers.0.{enorm, hnorm, eh_proj, input_layernorm, self_attn, post_attention_layernorm, mlp, shared_head.norm}.

S sequence, B micro-batch, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, ObjectiveConfig
from megatron_spec.drafts.contract import Attention, BaseEnds, DraftLosses
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import Linear, Placement, RMSNorm
from megatron_spec.drafts.recurrent import SharedHeadDraft
from megatron_spec.drafts.vocab import DraftVocab


class MtpModule(DraftLayer):
    """A decoder layer with its input projection and output norm."""

    def __init__(self, config: EagleConfig, place: Placement) -> None:
        super().__init__(config, False, place)
        H, norm = config.hidden_size, (config.rms_norm_eps, place)
        self.enorm, self.hnorm = RMSNorm(H, *norm), RMSNorm(H, *norm)
        self.eh_proj = Linear(2 * H, H, place.in_high_precision)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(H, *norm)})

    def combine(self, hidden_SBH: Tensor, embedding_SBH: Tensor) -> Tensor:
        """[S, B, H] input of the decoder layer."""
        out: Tensor = self.eh_proj(torch.cat([self.enorm(embedding_SBH), self.hnorm(hidden_SBH)], dim=-1))
        return out


class MtpDraft(SharedHeadDraft):
    """The MTP draft of one rank."""

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        self.layers = nn.ModuleList([MtpModule(config, place)])

    @property
    def decoder_layers(self) -> list[MtpModule]:
        """See RecurrentDraft."""
        return list(self.layers)  # type: ignore[arg-type]

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """See RecurrentDraft."""
        module = self.decoder_layers[0]
        cos, sin = self.rotary(positions_BS, hidden_SBH, attention)
        hidden_SBH = module.combine(hidden_SBH, embedding_SBH.to(hidden_SBH.dtype))
        hidden_SBH = module(hidden_SBH, embedding_SBH, cos, sin, attention, 0)
        normed_SBH = module.shared_head["norm"](hidden_SBH)
        return (normed_SBH if self.config.norm_output else hidden_SBH), normed_SBH

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Unroll over the micro-batch and return the loss sums."""
        hidden = self.start(features.captures_SBC, features.state_SBH)
        return self._token_losses(hidden, features, ends, objective)[0]
