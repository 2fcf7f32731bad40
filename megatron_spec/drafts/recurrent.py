"""Base classes of drafts that run on their own output: EAGLE-1, EAGLE-3, MTP.

S sequence, B micro-batch, H draft hidden size, D draft vocabulary, C captures width, TP tensor parallel size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import EagleConfig, ObjectiveConfig
from megatron_spec.drafts import few_rows
from megatron_spec.drafts.as_built import as_built
from megatron_spec.drafts.contract import Attention, BaseEnds, Draft, DraftLosses
from megatron_spec.drafts.initial import initial_values, set_parameters
from megatron_spec.drafts.layer import DraftLayer
from megatron_spec.drafts.linear import Placement, enter, pad_logits
from megatron_spec.drafts.teacher import TeacherHead, teacher_of
from megatron_spec.drafts.unroll import Supervision, head_losses, teach, unroll
from megatron_spec.drafts.vocab import DraftVocab, check_sizes
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops import backend
from megatron_spec.ops.attention import PLAIN, Variant, attend
from megatron_spec.ops.rope import inverse_frequencies, rotary_angles
from megatron_spec.ops.visibility import KVCache, Visibility


class RecurrentDraft(Draft):
    """A draft of decoder layers: `start` gives the state of step 0, `layer_step` runs one step.

    Every parameter is NaN until initialised or loaded.
    """

    def __init__(self, config: EagleConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__()
        check_sizes(vocab, config)
        self.config, self.vocab = config, vocab
        self.tp_group, self.sequence_parallel = place.group, place.sequence_parallel
        rotated = config.mla.rope_head_dim if config.mla else config.head_dim
        self._inv_freq = inverse_frequencies(config.rope, rotated)  # no buffer: must stay fp32 in a bf16 model
        self._rotary_factor = 1.0 if config.mla else config.rope.attention_factor  # latent attention applies its own
        self._teacher: TeacherHead | None = None
        self._rotary_tables: dict[Any, tuple[Tensor, Tensor]] = {}

    @property
    def decoder_layers(self) -> Sequence[DraftLayer]:
        """The decoder layers in order, whatever their names."""
        raise NotImplementedError

    def start(self, captures_SBC: Tensor, state_SBH: Tensor) -> Tensor:
        """[S, B, H] state of step 0 from captures and final state ([S / TP, ...] under sequence parallelism)."""
        raise NotImplementedError

    def embed(self, tokens_BS: Tensor, ends: BaseEnds) -> Tensor:
        """[S, B, H] token embeddings ([S / TP, B, H] under sequence parallelism): the base's, frozen."""
        with torch.no_grad():
            return ends.embed(tokens_BS)

    def layer_step(
        self, hidden_SBH: Tensor, embedding_SBH: Tensor, positions_BS: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """One draft step: (state to feed back, input of the LM head), both [S, B, H] ([S / TP, ...] under sequence
        parallelism).

        Args:
            hidden_SBH: state of step 0 (`start`), or the state fed back by the previous step.
            embedding_SBH: embedding of the token after each row.
            positions_BS: rotary positions of the full sequence.
        """
        raise NotImplementedError

    def logits(self, normed_SBH: Tensor, ends: BaseEnds | None = None) -> Tensor:
        """[S, B, D / TP] draft logits of this rank's shard (full sequence also under sequence parallelism).

        Args:
            ends: the base, for drafts that use its LM head.
        """
        raise NotImplementedError

    def initialize(
        self, ends: BaseEnds, base_layer_tensors: Mapping[str, Tensor] | None = None, seed: int = 1234
    ) -> None:
        """Initialise every parameter, independently of the tensor parallel size. Collective.

        Args:
            ends: the base's embedding and LM head.
            base_layer_tensors: unsharded tensors of the base's last layer by Hugging Face name inside the layer
                ("mlp.gate_proj.weight", "input_layernorm.weight", ...), and "norm.weight" for the final norm. The
                final norm is always used, the others with config.init_from_base_layer.
            seed: seed and name of a parameter determine its value.
        """
        set_parameters(self, initial_values(self, ends, base_layer_tensors or {}, seed), self.tp_group)

    def inv_freq_on(self, device: torch.device) -> Tensor:
        """fp32 [D / 2] rotary frequencies."""
        self._inv_freq = self._inv_freq.to(device)
        return self._inv_freq

    def rotary(self, positions_BS: Tensor, like: Tensor, attention: Attention | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions times YaRN's attention factor, in the dtype and on the device of `like`.

        Args:
            attention: that of `layer_step`; one of few rows has a table.
        """
        if isinstance(attention, few_rows.FewRows):
            return attention.rotary(positions_BS)
        angles = rotary_angles(positions_BS, self.inv_freq_on(like.device))
        factor = self._rotary_factor
        return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)

    def cached_attention(self, visibility: Visibility) -> Attention:
        """Attention of `layer_step` in decoding, with the draft's sliding window."""
        kind = self.paths.kernels("draft_decode")
        layers = self.decoder_layers
        if kind != "none" and few_rows.suits(layers, visibility) and as_built(layers):
            return few_rows.FewRows(backend.load(kind), visibility, self._rotary_table(visibility))
        window = self.config.sliding_window
        variant = PLAIN if window is None else Variant(window=window)
        return lambda layer, q, k, v: attend(q, k, v, visibility, layer, variant)

    def _rotary_table(self, visibility: Visibility) -> tuple[Tensor, Tensor]:
        """`rotary` of every slot of a cache, kept for good: recordings hold its address."""
        assert visibility.cache is not None
        keys = visibility.cache.keys
        name = (keys.shape[2], keys.dtype, keys.device)
        if name not in self._rotary_tables:
            self._rotary_tables[name] = self.rotary(torch.arange(keys.shape[2], device=keys.device)[None], keys)
        return self._rotary_tables[name]

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for decoding: this rank's key/value heads of every layer."""
        attention = self.decoder_layers[0].self_attn
        weight = self.decoder_layers[0].post_attention_layernorm.weight
        return KVCache(
            len(self.decoder_layers), batch, max_length, attention.num_kv_heads, attention.head_dim,
            weight.dtype, weight.device,
        )  # fmt: skip

    def teacher_head(self, ends: BaseEnds) -> TeacherHead:
        """The base's LM head restricted to the draft vocabulary, prepared on first use, which is a collective."""
        return teacher_of(self, ends)


class SharedHeadDraft(RecurrentDraft):
    """A draft that starts from the base's final state and uses the base's frozen LM head."""

    def start(self, captures_SBC: Tensor, state_SBH: Tensor) -> Tensor:
        """The base's final state."""
        return state_SBH.to(self.decoder_layers[0].post_attention_layernorm.weight.dtype)

    def logits(self, normed_SBH: Tensor, ends: BaseEnds | None = None) -> Tensor:
        """See `RecurrentDraft.logits`; `ends` is required."""
        assert ends is not None, "this draft has no head of its own"
        logits = enter(normed_SBH, self.tp_group, self.sequence_parallel) @ self.teacher_head(ends).draft_rows().t()
        return pad_logits(logits, len(self.vocab), self.tp_group)

    def _token_losses(
        self, hidden_SBH: Tensor, features: Features, ends: BaseEnds, objective: ObjectiveConfig
    ) -> tuple[DraftLosses, list[Tensor], Supervision, Teacher]:
        """(losses of the unroll from `hidden_SBH`, supervised rows [R, H] of the LM head's input at every step)."""
        group, scattered = self.tp_group, self.sequence_parallel
        head = self.teacher_head(ends)
        plan = Supervision.of(features.batch, objective.ttt_steps, objective.alignment)
        teacher = teach(features, plan, head, objective.temperature, group, scattered)
        embed = functools.partial(self.embed, ends=ends)
        states = unroll(self.layer_step, hidden_SBH, features, embed, plan, objective, group, scattered)
        losses = head_losses(
            states, head.draft_rows(), plan, teacher, objective, group, paths=self.paths, own=self.row_loss
        )
        return losses, states, plan, teacher
