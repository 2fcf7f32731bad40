"""EAGLE-3 (arXiv 2503.01840; docs/algorithms.md#eagle-3): one decoder layer on captures of several base layers.

Submodules have the names of the export format, shared by checkpoint, quantisation and export: fc, midlayer.* (or
layers.{i}.* with several layers), norm, lm_head, and embed_tokens if the draft has an embedding of its own
(`EagleConfig.own_embedding`).

S sequence, B micro-batch, K captured layers, C = K * base hidden size, H draft hidden size, D draft vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from megatron_spec.batch import Batch, Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, UserError
from megatron_spec.drafts.as_built import as_built, head_weight
from megatron_spec.drafts.contract import Attention, BaseEnds, DraftLosses
from megatron_spec.drafts.fused_unroll import fused_unroll, suits
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import Linear, Placement, RMSNorm, VocabEmbedding, VocabLinear, enter
from megatron_spec.drafts.recurrent import RecurrentDraft
from megatron_spec.drafts.unroll import Supervision, head_losses, teach, unroll
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops import shared_linear
from megatron_spec.ops.overlap import RankSums


class EagleDraft(RecurrentDraft):
    """The EAGLE-3 draft of one rank; EAGLE-3.1 adds norms before `fc` (input_norm, fc_norm.{i}) and `norm_output`."""

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__(config, vocab, place)
        if not config.capture_layer_ids:
            raise UserError("EAGLE-3 needs capture_layer_ids: the base layers whose outputs it reads")
        H = config.hidden_size
        captured = len(config.capture_layer_ids) * config.target_hidden_size
        norm = (config.rms_norm_eps, place)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(captured, *norm)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, *norm) for _ in config.capture_layer_ids)
        self.fc = Linear(captured, H, place.in_high_precision, config.fc_bias)
        layers = [DraftLayer(config, i == 0, place) for i in range(config.num_hidden_layers)]
        if len(layers) == 1:
            self.midlayer = layers[0]
        else:
            self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(H, *norm)
        if config.own_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, H, place)
        self.lm_head = VocabLinear(H, len(vocab), place)
        self.lm_head.weight.requires_grad_(not config.frozen_head)
        self.sums = RankSums(self.tp_group)

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """The decoder layers in order, whatever their names."""
        layers = [self.midlayer] if self.config.num_hidden_layers == 1 else list(self.layers)
        return layers  # type: ignore[return-value]

    @property
    def has_own_steps(self) -> bool:
        """True if a subclass, or a module that was replaced or has hooks, computes a step in its own way."""
        names = ("layer_step", "embed", "rotary")
        own = any(getattr(type(self), name) is not getattr(EagleDraft, name) for name in names)
        return own or not as_built(self.decoder_layers, self.norm)

    def embed(self, tokens_BS: Tensor, ends: BaseEnds) -> Tensor:
        """See RecurrentDraft; trained if the embedding is the draft's own."""
        return self.embed_tokens(tokens_BS) if self.config.own_embedding else super().embed(tokens_BS, ends)

    def start(self, captures_SBC: Tensor, state_SBH: Tensor) -> Tensor:
        """See RecurrentDraft: the projected captures."""
        return self.project(captures_SBC)

    def project(self, captures_SBC: Tensor) -> Tensor:
        """[S, B, H] feature of step 0 from the captures."""
        x = captures_SBC.to(next(self.fc.parameters()).dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fc = self.fc
        shared = not self.sequence_parallel and as_built((), fc) and fc.plain
        if not shared or not shared_linear.pays(x, len(fc.weight), self.tp_group):
            return fc(x)  # type: ignore[no-any-return]
        return shared_linear.shared_linear(fc.quantized_input(x), fc.quantized_weight(), fc.bias, self.tp_group)

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """See RecurrentDraft."""
        cos, sin = self.rotary(positions_BS, hidden_SBH, attention)
        embedding_SBH = embedding_SBH.to(hidden_SBH.dtype)
        for i, layer in enumerate(self.decoder_layers):
            hidden_SBH = layer(hidden_SBH, embedding_SBH, cos, sin, attention, i)
        normed_SBH = self.norm(hidden_SBH)
        return (normed_SBH if self.config.norm_output else hidden_SBH), normed_SBH

    def logits(self, normed_SBH: Tensor, ends: BaseEnds | None = None) -> Tensor:
        """See RecurrentDraft; the LM head is the draft's own."""
        out: Tensor = self.lm_head(enter(normed_SBH, self.tp_group, self.sequence_parallel))
        return out

    def prepare(self, batch: Batch, objective: ObjectiveConfig) -> None:
        """See Draft."""
        if not self.draws:
            Supervision.ahead(batch, objective.ttt_steps, objective.alignment)

    def supervision(self, batch: Batch, objective: ObjectiveConfig) -> Supervision:
        """Which rows of the micro-batch are supervised at which step."""
        return Supervision.of(batch, objective.ttt_steps, objective.alignment)

    def states(self, features: Features, plan: Supervision, ends: BaseEnds, objective: ObjectiveConfig) -> list[Tensor]:
        """Supervised rows [R, H] of the LM head's input, for every step."""
        hidden = self.start(features.captures_SBC, features.state_SBH)
        fused = self.paths.under(objective).on("draft_fused")
        if fused and suits(self, hidden, features.batch, objective.ttt_steps):
            return fused_unroll(self, hidden, features.batch, plan.rows, plan.active, ends)
        embed = functools.partial(self.embed, ends=ends)
        where = (self.tp_group, self.sequence_parallel, self.config.sliding_window)
        return unroll(self.layer_step, hidden, features, embed, plan, objective, *where)

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Unroll over the micro-batch and return the loss sums."""
        group, scattered = self.tp_group, self.sequence_parallel
        weight, plan = head_weight(self.lm_head), self.supervision(features.batch, objective)
        teacher = teach(features, plan, self.teacher_head(ends), objective.temperature, group, scattered)
        states = [self.lm_head.quantized_input(x) for x in self.states(features, plan, ends, objective)]
        return head_losses(states, weight, plan, teacher, objective, group, paths=self.paths, own=self.row_loss)
