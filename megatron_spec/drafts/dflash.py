"""DFlash (arXiv 2602.06036): one forward over the slots of a block, which starts at an anchor, proposes its tokens.

The context of row i is c_i = hidden_norm(fc [captures of row i]). Every layer computes keys and values of context and
block with the same projections, from c_i without a norm and from the block's state after the layer's input norm. Slot s
of anchor a has rotary position a + s, sees the context rows before a and its own block (`ops/block_attention.py`), and
uses the base's frozen LM head: slot s proposes t_{a+s}; the anchor's own slot proposes nothing.

Under sequence parallelism fc and hidden_norm are split over the sequence, while every tensor parallel rank has the
complete blocks. Under context parallelism a rank has the blocks anchored at its rows, and sees the whole context.

P blocks, C slots of a block, S sequence, B micro-batch, H hidden size, N query heads and G key/value heads of this
rank, D head size, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_spec.batch import Features
from megatron_spec.config import BlockConfig, ObjectiveConfig, UserError
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.as_built import as_built, head_weight
from megatron_spec.drafts.block_losses import BlockHead, block_losses
from megatron_spec.drafts.contract import Attention, BaseEnds, Draft, DraftLosses
from megatron_spec.drafts.initial import initial_values, set_parameters
from megatron_spec.drafts.layer import DraftLayer, Rotation
from megatron_spec.drafts.linear import (
    Linear,
    Placement,
    RMSNorm,
    VocabLinear,
    attached_quantizers,
    copy_to_ranks,
    enter,
    pad_logits,
)
from megatron_spec.drafts.teacher import TeacherHead, teacher_of
from megatron_spec.drafts.unroll import teach
from megatron_spec.drafts.vocab import DraftVocab, check_sizes
from megatron_spec.ops import backend
from megatron_spec.ops.block_attention import block_attention
from megatron_spec.ops.fused_layer import FusedLayer
from megatron_spec.ops.rope import inverse_frequencies, rotary_angles
from megatron_spec.ops.rows import pick_rows
from megatron_spec.ops.visibility import KVCache


class DFlashDraft(Draft):
    """fc, hidden_norm, layers.{i}, norm; embedding and LM head are the base's. Parameters are NaN until initialised.

    With a reduced draft vocabulary, lm_head has its rows of the base's LM head, frozen, as engines read them.
    """

    draws = True

    def __init__(self, config: BlockConfig, vocab: DraftVocab, place: Placement) -> None:
        super().__init__()
        check_sizes(vocab, config)
        self.config, self.vocab = config, vocab
        self.tp_group, self.sequence_parallel = place.group, place.sequence_parallel
        H = config.hidden_size
        blocks = replace(place, sequence_parallel=False)
        self.fc = Linear(len(config.capture_layer_ids) * H, H, place.in_high_precision)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps, place)
        self.layers = nn.ModuleList(DraftLayer(config, False, blocks) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(H, config.rms_norm_eps, blocks)
        if config.own_head:
            self.lm_head = VocabLinear(H, len(vocab), blocks)
            self.lm_head.weight.requires_grad_(not config.frozen_head)
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)  # no buffer: stays fp32 in a bf16 model
        self._teacher: TeacherHead | None = None

    @property
    def decoder_layers(self) -> Sequence[DraftLayer]:
        """The layers in order."""
        return list(self.layers)  # type: ignore[arg-type]

    def initialize(
        self, ends: BaseEnds, base_layer_tensors: Mapping[str, Tensor] | None = None, seed: int = 1234
    ) -> None:
        """Initialise every parameter; see `RecurrentDraft.initialize`."""
        set_parameters(self, initial_values(self, ends, base_layer_tensors or {}, seed), self.tp_group)

    def _cos_sin(self, positions_XY: Tensor) -> Rotation:
        self._inv_freq = self._inv_freq.to(positions_XY.device)
        angles, factor = rotary_angles(positions_XY.t(), self._inv_freq), self.config.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def rotation(self, positions_XY: Tensor, like: Tensor) -> Rotation:
        """(cos, sin) [X, Y, 1, D] of rotary positions, in the dtype of `like`."""
        cos, sin = self._cos_sin(positions_XY)
        return cos.to(like.dtype), sin.to(like.dtype)

    def tables(self, positions_XY: Tensor) -> Rotation:
        """fp32 (cos, sin) [X * Y, D / 2] of rotary positions, for fused layers."""
        cos, sin = (x[:, :, 0, : self.config.head_dim // 2] for x in self._cos_sin(positions_XY))
        return cos.flatten(0, 1).contiguous(), sin.flatten(0, 1).contiguous()

    def block_rotation(self, positions_P: Tensor, like: Tensor) -> Rotation:
        """(cos, sin) [P, C, 1, D] of all slots of the blocks anchored at `positions_P`."""
        return self.rotation(self.slot_positions(positions_P), like)

    def slot_positions(self, positions_P: Tensor) -> Tensor:
        """[P, C] rotary positions of all slots of the blocks anchored at `positions_P`."""
        return positions_P[:, None] + torch.arange(self.config.block_size, device=positions_P.device)

    @property
    def has_own_steps(self) -> bool:
        """True if a subclass, or a module that was replaced or has hooks, computes the states in its own way."""
        names = ("run_layers", "rotation", "block_rotation")
        own = any(getattr(type(self), name) is not getattr(DFlashDraft, name) for name in names)
        return own or not as_built(self.decoder_layers, self.fc, self.hidden_norm, self.norm)

    def fused_layer(self, positions_XY: Tensor) -> FusedLayer | None:
        """The parts of fused layers for rows at these positions; None if the plain layers run: in inference, with fake
        quantisers, and with steps of its own."""
        kernels = self.paths.kernels("draft_layer")
        if kernels == "none" or not torch.is_grad_enabled():
            return None
        if self.has_own_steps or attached_quantizers([self.fc, *self.layers.modules()]):
            return None
        return FusedLayer(backend.load(kernels), self.tables(positions_XY))

    def context(self, captures_SBC: Tensor, fused: FusedLayer | None = None) -> Tensor:
        """[S, B, H] context that every layer computes keys and values from; complete on every tensor parallel rank."""
        captures_SBC = captures_SBC.to(self.fc.weight.dtype)
        if fused is None:
            x = self.hidden_norm(self.fc(captures_SBC))
        else:
            _, x = fused.norm(self.hidden_norm, fused.products(captures_SBC, self.fc))
        return enter(x, self.tp_group, self.sequence_parallel)

    @torch.no_grad()
    def block_embedding(self, tokens_P: Tensor, ends: BaseEnds) -> Tensor:
        """[P, C, H] the base's embedding of the anchor tokens, and of the mask token in all other slots."""
        P, ranks = len(tokens_P), self.tp_group.size()
        mask = tokens_P.new_full((1 + -(P + 1) % ranks,), self.config.mask_token_id)
        both = enter(ends.embed(torch.cat([tokens_P, mask])[None]), self.tp_group, self.sequence_parallel)[:, 0]
        both = both.to(self.fc.weight.dtype)
        slots = both[P].expand(P, self.config.block_size - 1, -1)
        return torch.cat([both[:P, None], slots], dim=1)

    def run_layers(self, state_PCH: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """[P, C, H] state of every slot after the final norm: the input of the LM head."""
        for i, layer in enumerate(self.decoder_layers):
            state_PCH = layer(state_PCH, state_PCH, *rotation, attention, i)
        out: Tensor = self.norm(state_PCH)
        return out

    def run_fused_layers(
        self, state: Tensor, fused: FusedLayer, attention: Attention, rows_N: Tensor | None = None
    ) -> Tensor:
        """`run_layers` in fused parts: [P, C, H], or [N, H] of the slots `rows_N`, to which the last layer keeps after
        its attention."""
        delta, last = None, len(self.layers) - 1
        for i, layer in enumerate(self.decoder_layers):
            state, delta = layer.fused(state, delta, fused, attention, i, rows_N if i == last else None)
        return fused.norm(self.norm, state, delta)[1]

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for decoding: keys and values of context and block, this rank's heads of every layer."""
        attention, weight = self.decoder_layers[0].self_attn, self.fc.weight
        return KVCache(
            len(self.layers), batch, max_length, attention.num_kv_heads, attention.head_dim, weight.dtype,
            weight.device,
        )  # fmt: skip

    def teacher_head(self, ends: BaseEnds) -> TeacherHead:
        """The base's frozen LM head, prepared on first use, which is a collective."""
        return teacher_of(self, ends)

    def head_rows(self, ends: BaseEnds) -> Tensor:
        """[D / TP, H] rows of the LM head for this rank's shard of the draft vocabulary, frozen."""
        return head_weight(self.lm_head) if self.config.own_head else self.teacher_head(ends).draft_rows()

    def logits(self, normed_SBH: Tensor, ends: BaseEnds) -> Tensor:
        """[S, B, D / TP] logits of this rank's shard from complete states; see `pad_logits`."""
        logits = normed_SBH @ self.head_rows(ends).t()
        return pad_logits(logits, len(self.vocab), self.tp_group)

    def states(self, features: Features, plan: BlockPlan, ends: BaseEnds, rows_N: Tensor | None = None) -> Tensor:
        """[P * C, H] normed states of every slot of a micro-batch, or [N, H] of the (distinct) slots `rows_N`."""
        batch, triton = features.batch, self.paths.on("block_kernel")
        positions_BS = batch.local(batch.positions_BS)
        fused = self.fused_layer(positions_BS)
        # Sequences follow one another from here on, so keys and values need no transposition.
        context_BSH = self.context(features.captures_SBC, fused).transpose(0, 1).contiguous()
        rows = self.rotation(positions_BS, context_BSH)
        layouts = [plan.layout.masked(*self.config.mask_of(i)) for i in range(len(self.layers))]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attention of the slots over context and block."""
            own = self.decoder_layers[layer].self_attn
            found = own.keys_values(context_BSH, rows) if fused is None else own.fused_keys_values(context_BSH, fused)
            if batch.context is not None:
                joined_SBGD = batch.context.gather(torch.cat(found, 2).transpose(0, 1))
                found = joined_SBGD.transpose(0, 1).chunk(2, 2)
            keys, values = (x.flatten(0, 1) for x in found)
            return block_attention(q, k, v, keys, values, layouts[layer], triton)

        state_PCH = self.block_embedding(plan.tokens_P, ends)
        if fused is None:
            rotation = self.block_rotation(plan.positions_P, state_PCH)
            states = self.run_layers(state_PCH, rotation, attention).flatten(0, 1)
            return states if rows_N is None else pick_rows(states, rows_N)
        blocks = replace(fused, tables=self.tables(self.slot_positions(plan.positions_P)))
        states = self.run_fused_layers(state_PCH, blocks, attention, rows_N)
        return states.flatten(0, 1) if rows_N is None else states

    def forward(self, features: Features, ends: BaseEnds, objective: ObjectiveConfig) -> DraftLosses:
        """Losses of the blocks drawn for this step.

        Raises UserError unless objective.ttt_steps is the number of tokens that a block proposes (as set by
        `presets.objective_for`).
        """
        config, group = self.config, self.tp_group
        if objective.ttt_steps != config.num_steps:
            raise UserError(f"ttt_steps is {objective.ttt_steps}, but a block proposes {config.num_steps} tokens")
        plan = BlockPlan.of(features.batch, config, objective.anchors)
        head = self.teacher_head(ends)
        teacher = teach(features, plan.supervision, head, objective.temperature, group, self.sequence_parallel)
        states_NH = self.states(features, plan, ends, torch.cat(plan.supervision.rows))
        inputs, ids_V = self.block_head(states_NH, self.head_rows(ends), plan), None
        if config.own_head:
            ids_V = head.draft_ids
        return block_losses(inputs, plan, teacher, objective, group, self.paths, self.row_loss, ids_V)

    def block_head(self, states_NH: Tensor, weight_VH: Tensor, plan: BlockPlan) -> BlockHead:
        """Inputs of the losses: states of the supervised rows of all steps, and the LM head."""
        states_NH = copy_to_ranks(states_NH, self.tp_group)
        return BlockHead(list(states_NH.split([len(r) for r in plan.supervision.rows])), weight_VH)
