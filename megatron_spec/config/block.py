"""Architecture of block drafts: DFlash (arXiv 2602.06036) and DSpark (2607.05147) propose a block in one forward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_spec.config.core import require
from megatron_spec.config.decoder import DecoderDraftConfig

BlockAlgorithm = Literal["dflash", "dspark"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DecoderDraftConfig):
    """Architecture of a DFlash or DSpark draft: Qwen3-style layers between the base's embedding and the base's head.

    Built by `presets.block_config(base, algorithm, overrides)`.
    """

    algorithm: BlockAlgorithm
    """dflash or dspark."""
    num_target_layers: int
    """Layers of the base."""
    mask_token_id: int
    """Token of every slot but the first: in the base's embedding, never in text."""
    capture_layer_ids: tuple[int, ...]
    """Base layers whose outputs are the context, from 0, ascending."""
    draft_vocab_size: int = 0
    """Tokens that the draft can propose; 0: all of the base's."""
    block_size: int = 8
    """Slots of a block, the anchor included."""
    num_hidden_layers: int = 2
    """Decoder layers of the draft."""
    causal: bool = False
    """A slot sees the slots up to its own, not the whole block."""
    sliding_window: int | None = None
    """A slot sees the tokens at most this far before its own position; None: all of them."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, in which a slot sees the whole block, as some published drafts mix them."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the norms."""
    markov_rank: int = 0
    """DSpark: rank r of the correction by the token before a slot; required there, 0 for DFlash."""
    markov_head_type: MarkovHeadType = "vanilla"
    """DSpark: the correction reads the token before a slot alone; gated by the slot's state too; or the states and
    tokens of all earlier slots, in a recurrence. vLLM and TensorRT-LLM serve vanilla alone."""
    confidence_head: bool = True
    """DSpark: a head that predicts whether a slot's token is accepted; without it decoding cannot truncate blocks."""
    confidence_reads_markov: bool = True
    """DSpark: the confidence head reads W1 of the token before a slot in addition to the slot's state."""

    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True
    norm_before_residual: ClassVar[bool] = False
    mla: ClassVar[None] = None
    moe: ClassVar[None] = None
    reads_captures: ClassVar[bool] = False
    """Of EAGLE-3's first layer; a block draft reads captures as its context."""
    of_base: ClassVar[bool] = False
    own_embedding: ClassVar[bool] = False
    own_embed_tokens: ClassVar[bool] = False
    init_attention: ClassVar[bool] = False
    fc_bias: ClassVar[bool] = False
    layer_in_base: ClassVar[int | None] = None
    regresses_state: ClassVar[bool] = False
    is_module: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.draft_vocab_size == 0:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        super().__post_init__()

    @property
    def own_head(self) -> bool:
        """A frozen copy of the LM head's rows for a reduced draft vocabulary; else the base's LM head."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def frozen_head(self) -> bool:
        """A head of its own is never trained."""
        return self.own_head

    @property
    def has_markov_head(self) -> bool:
        """DSpark: a Markov head corrects the logits of a slot by the token before it."""
        return self.algorithm == "dspark"

    @property
    def has_confidence_head(self) -> bool:
        """DSpark, unless it was left out."""
        return self.has_markov_head and self.confidence_head

    @property
    def first_slot(self) -> int:
        """First slot that proposes: DSpark's anchor slot does, DFlash's does not."""
        return 0 if self.has_markov_head else 1

    @property
    def num_steps(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - self.first_slot

    def mask_of(self, layer: int) -> tuple[bool, int | None]:
        """(causal, sliding window) of a layer."""
        return (False, None) if layer in self.full_attention_layers else (self.causal, self.sliding_window)

    @property
    def target_hidden_size(self) -> int:
        """Width of the base."""
        return self.hidden_size

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        self.rope.check_draft()
        least = {"block_size": 2, "markov_rank": 0}
        for name, bound in least.items():
            require(getattr(self, name) >= bound, f"{name} must be at least {bound}, found {getattr(self, name)}")
        ids = self.capture_layer_ids
        require(
            bool(ids) and all(a < b for a, b in itertools.pairwise((-1, *ids, self.num_target_layers))),
            f"capture_layer_ids must be distinct, ascending and in 0..{self.num_target_layers - 1}, found {list(ids)}",
        )
        self._validate_mask_token_id(self.mask_token_id)
        self._validate_draft_vocab_size(self.draft_vocab_size)
        self._validate_layers()
        require(
            self.block_size <= self.max_position_embeddings,
            f"block_size {self.block_size} is longer than max_position_embeddings {self.max_position_embeddings}",
        )
        require(
            self.sliding_window is None or self.sliding_window >= (1 if self.causal else self.block_size),
            f"sliding_window must be at least {'1' if self.causal else 'block_size'}, found {self.sliding_window}",
        )
        full = self.full_attention_layers
        require(
            not full or (self.sliding_window is not None and len(full) < self.num_hidden_layers
                         and all(a < b for a, b in itertools.pairwise((-1, *full, self.num_hidden_layers)))),
            f"full_attention_layers must be some of 0..{self.num_hidden_layers - 1}, ascending, beside a "
            f"sliding_window, found {list(full)}",
        )  # fmt: skip
        self._validate_markov()

    def _validate_markov(self) -> None:
        if self.has_markov_head:
            require(self.markov_rank >= 1, "dspark needs markov_rank of at least 1, found 0")
            require(
                self.confidence_head or self.confidence_reads_markov,
                "confidence_reads_markov is an option of the confidence head, found with confidence_head false: leave "
                "it out",
            )
            return
        default = type(self).__dataclass_fields__
        for name in ("markov_rank", "markov_head_type", "confidence_head", "confidence_reads_markov"):
            value = getattr(self, name)
            require(value == default[name].default, f"{name} is an option of dspark, found with {self.algorithm}")
