"""The frozen base: this rank's pipeline stage, with embedding and head on every rank.

S sequence, B micro-batch, H hidden, TP tensor parallel size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron_spec.base import placement, relay, te
from megatron_spec.base.core_model import CoreModel, check_rows, core_model, stage_counts, unwrapped
from megatron_spec.base.direct import DirectForward
from megatron_spec.base.modules import CoreAttention
from megatron_spec.base.moe import LocalExperts, MixtureOfExperts, Router, ask_once
from megatron_spec.base.spec import block_spec
from megatron_spec.base.stage import CoreStage
from megatron_spec.batch import Batch
from megatron_spec.config import LOCAL, BaseConfig, BaseLayers, UserError
from megatron_spec.families.names import padded_vocab
from megatron_spec.families.transformer_config import transformer_config
from megatron_spec.ops import backend
from megatron_spec.ops.rope import inverse_frequencies, rotary_angles
from megatron_spec.ops.visibility import KVCache, Visibility
from megatron_spec.planning import layouts
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import platform
from megatron_spec.runtime.distributed import World

log = logging.getLogger(__name__)


@contextmanager
def record_outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields a list that the forward fills with the output [S, B, H] of each of `layers`, in the order they run."""
    recorded: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        """Record the output of the layer."""
        # megatron-core's TransformerLayer returns (hidden, context).
        recorded.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _group_experts(base: FrozenBase) -> None:
    ask_once(module for module in base.modules() if isinstance(module, MixtureOfExperts))
    if not base.paths.on("grouped_experts"):
        return
    kind = base.paths.kernels("grouped_experts")
    for module in base.modules():
        if isinstance(module, (LocalExperts, Router)):
            module.kernels = backend.load("plain" if kind == "none" else kind)


def default_paths(config: BaseConfig, world: World, dtype: torch.dtype, layers: BaseLayers) -> Paths:
    """All fast paths of a base that run here, and Transformer Engine's fp8 if `layers` requests it."""
    name = str(dtype).removeprefix("torch.")
    wanted = ("te_fp8",) if layers.recipe else ()
    return Paths(Setting(platform.machine(), name, world.parallel, config, layers=layers, wanted=wanted))


def _use_engine(base: FrozenBase) -> None:
    """Attention and experts of Transformer Engine, where the paths say so."""
    fp8 = base.paths.on("te_fp8")
    if base.paths.on("te_attention"):
        _use_attention(base)
    for _, layer in base.layers():
        experts = getattr(layer.mlp, "experts", None)
        if base.paths.on("te_experts") and isinstance(experts, LocalExperts):
            experts.engine = te.GroupedExperts(experts, fp8)
    if fp8 and base.paths.setting.layers.recipe == "delayed":
        base.delayed_scaling = te.DelayedScaling(base.model)


def _use_attention(base: FrozenBase) -> None:
    """Attention of Transformer Engine in the layers for which it has a kernel."""
    config, world, own = base.config, base.world, list[int]()
    fused: dict[Any, bool] = {}  # one probe for layers whose attention has the same options
    for number, layer in base.layers():
        core = layer.self_attention.core_attention
        attention = te.attention(core, config, number, base.model.config, world.base_groups)
        options = (core.window, core.scale, core.softmax_offset is None)
        if options not in fused:
            fused[options] = te.is_fused(attention, config, world, base.dtype)
        if fused[options]:
            core.engine = (attention,)
        else:
            own.append(number)
    if own and world.tp_rank == world.dp_rank == 0:
        log.warning(
            "Transformer Engine has no fused attention for layers %s here and would hold all scores in memory: this "
            "package's attention runs in them (%s; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows the reason)",
            ", ".join(map(str, own)), te.versions_of_cudnn(),
        )  # fmt: skip
    if len(own) == len(base.attentions):
        base.paths = base.paths.without("te_attention")


@contextmanager
def _seeing(attentions: Sequence[CoreAttention], visibility: Visibility) -> Iterator[None]:
    """Attention modules with this visibility."""
    for attention in attentions:
        attention.visibility = visibility
    try:
        yield
    finally:
        for attention in attentions:
            attention.visibility = None  # do not keep a cache or mask alive


class FrozenBase(CoreStage):
    """One pipeline stage of the base, frozen.

    Attributes:
        paths: the fast paths it may use; their setting says what the layers are built from.
        delayed_scaling: ranges of Transformer Engine's delayed fp8; None: another recipe, or no fp8.
        direct: runs the layers without their modules where the result is the same; None if this base cannot.
    """

    def __init__(
        self, config: BaseConfig, world: World, core: CoreModel, stages: list[placement.Stage], dtype: torch.dtype,
        paths: Paths | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, world, core, stages, dtype)
        self.reference: Any = None  # `BaseReference` of a base loaded from disk
        self.quantised_on_disk = False
        """True if the base's files are in fp8 and bring their own activation ranges, so calibration is not needed."""
        rotary = config.mla.rope_head_dim if config.mla else config.head_dim
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inverse_frequencies(config.rope, rotary, world.device), persistent=False)
        self.inv_freq_long: Tensor | None
        longrope = config.rope.type == "longrope"
        long = inverse_frequencies(config.rope, rotary, world.device, long=True) if longrope else None
        self.register_buffer("inv_freq_long", long, persistent=False)
        candidates = [layer.self_attention.core_attention for _, layer in self.layers()]
        self.attentions = [attention for attention in candidates if isinstance(attention, CoreAttention)]
        for index, attention in enumerate(self.attentions):
            attention.cache_layer = index
        self.paths = paths or default_paths(config, world, dtype, LOCAL)
        _group_experts(self)
        self.delayed_scaling: te.DelayedScaling | None = None
        _use_engine(self)
        self.direct = self._direct_forward()
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def build(
        cls,
        config: BaseConfig,
        world: World,
        capture_layer_ids: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        padded_vocab_size: int | None = None,
        layers: BaseLayers = LOCAL,
        paths: Paths | None = None,
    ) -> FrozenBase:
        """A stage whose weights are NaN until they are loaded.

        Args:
            padded_vocab_size: rows of embedding and head over all ranks; default: the vocabulary rounded up to a
                multiple of the tensor parallel size.
            layers: what the layers are built from.
            paths: fast paths it may use, for these layers; default: all that run here.

        Raises:
            UserError: the parallel sizes or capture ids do not fit the base, or the layers cannot be built here.
        """
        placement.check_parallel(config, world.parallel)
        te.check(layers, platform.machine())
        paths = paths or default_paths(config, world, dtype, layers)
        paths.check()
        stages = placement.place(config.num_layers, world.parallel, capture_layer_ids)
        counts = [stage.count for stage in stages]
        first, count = stages[world.pp_rank].first, counts[world.pp_rank]
        spec = block_spec(config, world, first, count, layers.engine)
        gpt = GPTModel(
            config=transformer_config(config, world.parallel, counts, dtype, layers),
            transformer_layer_spec=spec,
            vocab_size=padded_vocab_size or padded_vocab(config.vocab_size, world.tp_size),
            max_sequence_length=config.max_position_embeddings,
            pre_process=world.is_first_stage,
            post_process=world.is_last_stage,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type="none",  # angles come from ops.rope, for arbitrary positions
            pg_collection=world.base_groups,
        )
        base = cls(config, world, core_model(gpt), stages, dtype, paths)
        for parameter in base.parameters():
            parameter.data.fill_(float("nan"))
        return base

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Capture the outputs of these layers from now on. Raises UserError for layers that do not exist."""
        placement.check_captures(self.config.num_layers, layer_ids)
        stages = placement.stages_from_counts(self.stage_counts, layer_ids)
        self.stage, self.capture_layer_ids = stages[self.world.pp_rank], stages[-1].captures_out

    @classmethod
    def wrap(cls, given: Any, config: BaseConfig, world: World, capture_layer_ids: Sequence[int]) -> FrozenBase:
        """Wrap a GPTModel or HybridModel (or a list of one chunk) that is built and loaded, on every rank of `world`.

        It keeps its own attention, so it serves causal training batches only: no packed documents, no KV cache.

        Raises:
            UserError: more than one model chunk; layers of a HybridModel that are neither attention nor MLP or do not
                pair up; a model that differs from the configuration; longrope; or capture ids that do not fit.
        """
        layouts.check("wrap", world.parallel)
        if config.rope.longest_short is not None:
            raise UserError("a wrapped model chooses longrope's frequencies per batch: load the base with load_base")
        model = unwrapped(given)
        counts = stage_counts(model, config, world.pp)
        placement.check_captures(config.num_layers, capture_layer_ids)
        stages = placement.stages_from_counts(counts, capture_layer_ids)
        base = cls(config, world, core_model(model), stages, next(model.parameters()).dtype)
        base.share_ends()
        return base

    def _direct_forward(self) -> DirectForward | None:
        fused = any("layer_norm_weight" in name for name in self.core.weights())
        if fused or len(self.attentions) != self.stage.count or not self.paths.on("base_direct"):
            return None
        final_norm = self.core.final_norm.weight if self.world.is_last_stage else None
        return DirectForward(self.config, self.core.layers, final_norm, self.world.tp, self.paths)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Empty cache for the layers and key/value heads of this rank."""
        if len(self.attentions) != self.stage.count:
            raise UserError("a wrapped model keeps its own attention and cannot decode with a cache: use load_base")
        config = self.config
        return KVCache(
            self.stage.count, batch, max_length, self._cached_heads(), config.head_dim, self.dtype, self.world.device,
            config.value_dim,
        )  # fmt: skip

    def cache_bytes(self, slots: int) -> int:
        """Bytes of `new_cache` for one sequence."""
        width = self._cached_heads() * (self.config.head_dim + self.config.value_dim)
        return self.stage.count * slots * width * self.dtype.itemsize

    def _cached_heads(self) -> int:
        return max(1, self.config.num_key_value_heads // self.world.tp_size)

    def _frequencies(self, batch: Batch, visibility: Visibility) -> Tensor:
        """Rotary frequencies. longrope has two sets: the length of a token's document selects one (see ops/rope.py)."""
        limit = self.config.rope.longest_short
        if self.inv_freq_long is None or limit is None:
            return self.inv_freq
        if visibility.cache is None:
            length_BS = batch.local(batch.document_lengths())
        else:
            known_B = visibility.lengths_B if visibility.lengths_B is not None else batch.positions_BS.amax(1) + 1
            length_BS = known_B[:, None].expand_as(batch.positions_BS)
        return torch.where(length_BS.t()[..., None] > limit, self.inv_freq_long, self.inv_freq)

    def _angles(self, batch: Batch, visibility: Visibility) -> Tensor:
        if len(self.attentions) == self.stage.count:
            return rotary_angles(batch.local(batch.positions_BS), self._frequencies(batch, visibility))
        if not visibility.is_causal:
            raise UserError(
                "a wrapped model keeps its own causal attention and cannot run packed documents, context "
                "parallelism or a cache: load the base with load_base, or give one document per row"
            )
        S = batch.tokens_BS.shape[1]
        check_rows(self.model, self.config, S)
        # Fused kernels expect one row of angles for the whole batch.
        return rotary_angles(torch.arange(S, device=self.world.device)[None], self.inv_freq)

    @torch.no_grad()
    def forward(self, batch: Batch, visibility: Visibility, relayed: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Run this stage.

        Args:
            batch: the micro-batch (its tokens are read on the first stage, its positions on all).
            visibility: which keys each row sees.
            relayed: [S, B, H * (1 + k_in)] from the previous stage; None on the first stage.

        Returns:
            hidden [S, B, H] (after the final norm on the last stage) and the captures so far, each [S, B, H]
            (S / TP rows under sequence parallelism).
        """
        captures: list[Tensor] = []
        if relayed is None:
            hidden = self.embed(batch.local(batch.tokens_BS), known=visibility.key_slots > 0)
        else:
            hidden, captures = relay.split(relayed, self.config.hidden_size)
        direct = self.direct
        if direct is not None and direct.can_run(visibility):
            wanted = [i - self.stage.first for i in self.stage.captures_own]
            positions = batch.local(batch.positions_BS)
            with platform.direct():
                hidden, recorded = direct(hidden, positions, self.inv_freq, wanted, visibility)
            return hidden, captures + recorded
        if direct is not None and direct.operators.weights_released:
            raise UserError("a base in fp8 serves training batches only: it has no weights for decoding or quantisers")
        captured = [self.core.outputs[i - self.stage.first] for i in self.stage.captures_own]
        decoder = self.model.decoder
        if not self.model.pre_process:
            decoder.set_input_tensor(hidden)
        own_layers = len(self.attentions) == self.stage.count  # they never request the device "cuda" by name
        calls = platform.direct() if own_layers else nullcontext()
        angles = self._angles(batch, visibility)
        forward = functools.partial(decoder, hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
        ranges = nullcontext() if self.delayed_scaling is None else self.delayed_scaling.updated(forward)
        with _seeing(self.attentions, visibility), calls, ranges, record_outputs(captured) as recorded:
            hidden = forward()
        decoder.set_input_tensor(None)
        return hidden, captures + recorded
