"""EAGLE-3 (arXiv 2503.01840): one decoder layer on the features of several base layers.

Submodules carry the names of the export format, so that checkpoint, quantisation and export share one naming:
fc, midlayer.* (or layers.{i}.* when there are several), norm, lm_head.

S sequence, B micro-batch, K captured layers, C = K * target hidden size, H draft hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, UserError
from megatron_spec.drafts.base import Attention, BaseEnds, Draft, DraftLosses
from megatron_spec.drafts.fused_unroll import can_fuse, fused_unroll
from megatron_spec.drafts.initial import initial_values, set_parameters
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import ColumnLinear, Linear, RMSNorm, enter
from megatron_spec.drafts.teacher import TeacherHead
from megatron_spec.drafts.unroll import Supervision, head_losses, teach, unroll
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops.attention import KVCache
from megatron_spec.ops.rope import inverse_frequencies, rotary_angles


class EagleDraft(Draft):
    """The EAGLE-3 draft of one rank. Every parameter is NaN until `initialize` or a checkpoint sets it."""

    def __init__(
        self, config: EagleConfig, vocab: DraftVocab, tp_group: dist.ProcessGroup, sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        _check(config, vocab)
        self.config, self.vocab, self.tp_group, self.sequence_parallel = config, vocab, tp_group, sequence_parallel
        H, place = config.hidden_size, (dtype, device)
        captured = len(config.capture_layer_ids) * config.target_hidden_size
        self.fc = Linear(captured, H, sequence_parallel, *place)
        layers = [
            DraftLayer(config, i == 0, tp_group, sequence_parallel, *place) for i in range(config.num_hidden_layers)
        ]
        if len(layers) == 1:
            self.midlayer = layers[0]
        else:
            self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(H, config.rms_norm_eps, sequence_parallel, *place)
        self.lm_head = ColumnLinear(H, len(vocab), tp_group, "draft_vocab_size", *place)
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)  # no buffer: must stay fp32 in a bf16 model
        self._teacher: TeacherHead | None = None

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """The decoder layers in order, whatever their names."""
        layers = [self.midlayer] if self.config.num_hidden_layers == 1 else list(self.layers)
        return layers  # type: ignore[return-value]

    def initialize(
        self, ends: BaseEnds, base_layer_tensors: Mapping[str, Tensor] | None = None, seed: int = 1234
    ) -> None:
        """Set every parameter; values do not depend on the number of tensor parallel ranks. A collective.

        Args:
            ends: the base's embedding and head.
            base_layer_tensors: whole (unsharded) tensors of the base's last layer under their Hugging Face names
                inside the layer ("mlp.gate_proj.weight", "input_layernorm.weight", ...), and "norm.weight" for the
                final norm. The final norm is always used; the layer's when config.init_from_base_layer.
            seed: together with a parameter's name it determines the parameter.
        """
        set_parameters(self, initial_values(self, ends, base_layer_tensors or {}, seed), self.tp_group)

    def project(self, captures_SBC: Tensor) -> Tensor:
        """[S, B, H] feature of step 0 from the captured base layers."""
        out: Tensor = self.fc(captures_SBC.to(self.fc.weight.dtype))
        return out

    def inv_freq_on(self, device: torch.device) -> Tensor:
        """fp32 [D / 2] rotary frequencies."""
        self._inv_freq = self._inv_freq.to(device)
        return self._inv_freq

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """One draft step: (state to feed back, state the head reads), both [S, B, H] ([S / TP, ...] sharded).

        Args:
            hidden_SBH: `project`ed feature, or what the step before fed back.
            embedding_SBH: base embedding of the token after each row.
            positions_BS: rotary position of each row, for the whole sequence.
        """
        angles = rotary_angles(positions_BS, self.inv_freq_on(hidden_SBH.device))
        cos, sin = angles.cos().to(hidden_SBH.dtype), angles.sin().to(hidden_SBH.dtype)
        embedding_SBH = embedding_SBH.to(hidden_SBH.dtype)
        for i, layer in enumerate(self.decoder_layers):
            hidden_SBH = layer(hidden_SBH, embedding_SBH, cos, sin, attention, i)
        return hidden_SBH, self.norm(hidden_SBH)

    def logits(self, normed_SBH: Tensor) -> Tensor:
        """[S, B, D / TP] draft logits of this rank's shard (full sequence also under sequence parallelism)."""
        out: Tensor = self.lm_head(enter(normed_SBH, self.tp_group, self.sequence_parallel))
        return out

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for decoding: this rank's key/value heads of every draft layer."""
        weight, attention = self.fc.weight, self.decoder_layers[0].self_attn
        return KVCache(
            self.config.num_hidden_layers, batch, max_length, attention.num_kv_heads, attention.head_dim,
            weight.dtype, weight.device,
        )

    def teacher_head(self, ends: BaseEnds) -> TeacherHead:
        """The frozen restricted head, built on first use. A collective when it has to be built."""
        if self._teacher is None or not self._teacher.fits(ends):
            self._teacher = TeacherHead(ends, self.vocab, self.tp_group)
        return self._teacher

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Unroll over the micro-batch and return the loss sums."""
        group, scattered = self.tp_group, self.sequence_parallel
        plan = Supervision.of(features.batch, objective.ttt_steps, objective.alignment)
        teacher = teach(features, plan, self.teacher_head(ends), objective.temperature, group, scattered)
        hidden = self.project(features.captures_SBC)
        if can_fuse(self, hidden, objective.detach):
            states = fused_unroll(self, hidden, features.batch, plan.rows, ends)
        else:
            states = unroll(self.layer_step, hidden, features, ends, plan, objective, group, scattered)
        states = [self.lm_head.quantized_input(x) for x in states]
        return head_losses(states, self.lm_head.quantized_weight(), plan, teacher, objective, group)


def _check(config: EagleConfig, vocab: DraftVocab) -> None:
    if len(vocab) != config.draft_vocab_size or vocab.vocab_size != config.vocab_size:
        raise UserError(
            f"draft vocabulary has {len(vocab)} of {vocab.vocab_size} tokens, the draft's configuration says "
            f"{config.draft_vocab_size} of {config.vocab_size}"
        )
    if not config.capture_layer_ids:
        raise UserError("EAGLE-3 needs capture_layer_ids: the base layers whose outputs it reads")
