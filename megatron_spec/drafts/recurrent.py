"""What all drafts share that run on their own output: EAGLE-1, EAGLE-3, MTP.

S sequence, B micro-batch, H draft hidden size, D draft vocabulary, C captures width, TP tensor parallel size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, ObjectiveConfig, UserError
from megatron_spec.drafts.contract import Attention, BaseEnds, Draft, DraftLosses
from megatron_spec.drafts.initial import initial_values, set_parameters
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import Placement, enter
from megatron_spec.drafts.teacher import TeacherHead, teacher_of
from megatron_spec.drafts.unroll import Supervision, head_losses, teach, unroll
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops.attention import PLAIN, Variant, attend
from megatron_spec.ops.rope import inverse_frequencies, rotary_angles
from megatron_spec.ops.visibility import KVCache, Visibility


class RecurrentDraft(Draft):
    """A draft of decoder layers: `start` gives the state of step 0, `layer_step` goes one step further.

    Every parameter is NaN until `initialize` or a checkpoint sets it.
    """

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__()
        if len(vocab) != config.draft_vocab_size or vocab.vocab_size != config.vocab_size:
            raise UserError(
                f"draft vocabulary has {len(vocab)} of {vocab.vocab_size} tokens, the draft's configuration says "
                f"{config.draft_vocab_size} of {config.vocab_size}"
            )
        self.config, self.vocab = config, vocab
        self.tp_group, self.sequence_parallel = place.group, place.sequence_parallel
        rotated = config.mla.rope_head_dim if config.mla else config.head_dim
        self._inv_freq = inverse_frequencies(config.rope, rotated)  # no buffer: must stay fp32 in a bf16 model
        self._rotary_factor = 1.0 if config.mla else config.rope.attention_factor  # latent attention applies its own
        self._teacher: TeacherHead | None = None

    @property
    def decoder_layers(self) -> Sequence[DraftLayer]:
        """The decoder layers in order, regardless of their names."""
        raise NotImplementedError

    def start(self, captures_SBC: Tensor, state_SBH: Tensor) -> Tensor:
        """[S, B, H] state of step 0 from the features of the base ([S / TP, ...] under sequence parallelism)."""
        raise NotImplementedError

    def embed(self, tokens_BS: Tensor, ends: BaseEnds) -> Tensor:
        """[S, B, H] token embeddings ([S / TP, B, H] under sequence parallelism): the base's, frozen."""
        with torch.no_grad():
            return ends.embed(tokens_BS)

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """One draft step: (state to feed back, state the head reads), both [S, B, H] ([S / TP, ...] sharded).

        Args:
            hidden_SBH: state of step 0 (`start`), or what the step before fed back.
            embedding_SBH: base embedding of the token after each row.
            positions_BS: rotary position of each row, for the whole sequence.
        """
        raise NotImplementedError

    def logits(self, normed_SBH: Tensor, ends: BaseEnds | None = None) -> Tensor:
        """[S, B, D / TP] draft logits of this rank's shard (full sequence also under sequence parallelism).

        Args:
            ends: the base, for drafts that use its head.
        """
        raise NotImplementedError

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

    def inv_freq_on(self, device: torch.device) -> Tensor:
        """fp32 [D / 2] rotary frequencies."""
        self._inv_freq = self._inv_freq.to(device)
        return self._inv_freq

    def rotary(self, positions_BS: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions, times YaRN's attention factor, in the dtype and on the device of `like`."""
        angles = rotary_angles(positions_BS, self.inv_freq_on(like.device))
        factor = self._rotary_factor
        return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)

    def cached_attention(self, visibility: Visibility) -> Attention:
        """The attention that decoding gives `layer_step`: keys and values by `visibility`, and the draft's window."""
        window = self.config.sliding_window
        variant = PLAIN if window is None else Variant(window=window)
        return lambda layer, q, k, v: attend(q, k, v, visibility, layer, variant)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for decoding: this rank's key/value heads of every draft layer."""
        attention = self.decoder_layers[0].self_attn
        weight = self.decoder_layers[0].post_attention_layernorm.weight
        return KVCache(
            len(self.decoder_layers), batch, max_length, attention.num_kv_heads, attention.head_dim,
            weight.dtype, weight.device,
        )  # fmt: skip

    def teacher_head(self, ends: BaseEnds) -> TeacherHead:
        """The frozen restricted head, built on first use. A collective when it has to be built."""
        return teacher_of(self, ends)


class SharedHeadDraft(RecurrentDraft):
    """A draft that starts from the base's final state and uses the base's own, frozen head."""

    def start(self, captures_SBC: Tensor, state_SBH: Tensor) -> Tensor:
        """The base's final state itself."""
        return state_SBH.to(self.decoder_layers[0].post_attention_layernorm.weight.dtype)

    def logits(self, normed_SBH: Tensor, ends: BaseEnds | None = None) -> Tensor:
        """See `RecurrentDraft.logits`; `ends` is required."""
        assert ends is not None, "this draft has no head of its own"
        return enter(normed_SBH, self.tp_group, self.sequence_parallel) @ self.teacher_head(ends).draft_rows().t()

    def _token_losses(
        self, hidden_SBH: Tensor, features: Features, ends: BaseEnds, objective: ObjectiveConfig
    ) -> tuple[DraftLosses, list[Tensor], Supervision, Teacher]:
        """Unroll from `hidden_SBH`; also the supervised rows [R, H] that the head read at every step."""
        group, scattered = self.tp_group, self.sequence_parallel
        head = self.teacher_head(ends)
        plan = Supervision.of(features.batch, objective.ttt_steps, objective.alignment)
        teacher = teach(features, plan, head, objective.temperature, group, scattered)
        embed = functools.partial(self.embed, ends=ends)
        states = unroll(self.layer_step, hidden_SBH, features, embed, plan, objective, group, scattered)
        losses = head_losses(states, head.draft_rows(), plan, teacher, objective, group, paths=self.paths)
        return losses, states, plan, teacher
