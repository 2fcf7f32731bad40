"""Architecture of a draft."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_spec.config.base import MlaConfig, MoeConfig
from megatron_spec.config.block import BlockConfig
from megatron_spec.config.core import Config, require
from megatron_spec.config.decoder import DecoderDraftConfig

EagleAlgorithm = Literal["eagle1", "eagle3", "eagle3.1", "p-eagle", "eagle-mtp"]
READS_CAPTURES = ("eagle3", "eagle3.1", "p-eagle")
"""EAGLE-3 and what is built like it."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderDraftConfig):
    """Architecture of an EAGLE draft. Names follow the exported config.json where it has one.

    Built by `presets.eagle_config(base, overrides)`, which fills every field from the base.
    """

    algorithm: EagleAlgorithm
    """EAGLE variant."""
    draft_vocab_size: int
    """Draft vocabulary D <= V; D = V needs no d2t."""
    target_hidden_size: int
    """Width of the base."""
    capture_layer_ids: tuple[int, ...] = ()
    """EAGLE-3: base layers whose *outputs* are captured, from 0, ascending, global."""
    num_hidden_layers: int = 1
    """Decoder layers of the draft."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the norms."""
    init_attention: bool = False
    """With `init_from_base_layer`: copy attention, too (in EAGLE-3 q, k and v into the half that reads the feature)."""
    frozen_head: bool = False
    """EAGLE-3: freeze the LM head at the base's rows of the draft vocabulary."""
    norm_before_fc: bool = False
    """EAGLE-3.1: one norm over all captures together, before `fc`."""
    fc_norm: bool = False
    """EAGLE-3.1: a separate norm for every capture, before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1 and eagle-mtp: a draft step feeds back its state after the final norm, not before it."""
    qk_norm: bool = False
    """An RMSNorm over every query and key head, before rotation (Qwen 3). Served by vLLM only."""
    attention_bias: bool = False
    """Biases on q, k, v and the output projection. Served by vLLM only."""
    mlp_bias: bool = False
    """Biases on the three projections of the MLP. Served by vLLM only."""
    fc_bias: bool = False
    """A bias after `fc`: EAGLE-1 as SafeAILab publishes it. Served by SGLang only."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual stream starts after `hidden_norm`, not before it. Served by vLLM only."""
    own_embed_tokens: bool = False
    """EAGLE-3: a separate embedding even at the base's width. Served by vLLM only."""
    sliding_window: int | None = None
    """EAGLE-3: a row sees itself and the sliding_window - 1 rows before it, in training and decoding; null: all rows.
    Served by vLLM only."""
    mask_token_id: int | None = None
    """P-EAGLE: token that is read at every depth after the first: in the base's embedding, never in text."""
    moe: MoeConfig | None = None
    """eagle-mtp: the base's own prediction module, a layer of the base's kind."""
    mla: MlaConfig | None = None
    """eagle-mtp: latent attention of the base's own prediction module."""
    layer_in_base: int | None = None
    """eagle-mtp: number of the base's own prediction module among the layers of its files."""

    @property
    def of_base(self) -> bool:
        """Whether this is the base's own prediction module, not a fresh layer."""
        return self.layer_in_base is not None

    @property
    def own_embedding(self) -> bool:
        """Whether the draft has its own embedding: on request, and always if its width is not the base's."""
        return self.own_embed_tokens or self.hidden_size != self.target_hidden_size

    @property
    def reads_captures(self) -> bool:
        """EAGLE-3: step 0 starts from captured base layers, not from the base's final state.

        Its first layer reads the token embedding and the state; it has its own final norm and head.
        """
        return self.algorithm in READS_CAPTURES

    @property
    def fc_of_equal_widths(self) -> bool:
        """The captures together are as wide as the draft, as a single one is: some engines then leave `fc` out."""
        return self.reads_captures and len(self.capture_layer_ids) * self.target_hidden_size == self.hidden_size

    @property
    def fc_of_one_capture(self) -> bool:
        """A single capture, of another width than the draft: some engines then build no `fc`."""
        return self.reads_captures and len(self.capture_layer_ids) == 1 and not self.fc_of_equal_widths

    @property
    def norm_before_fc_and_fc_norm(self) -> bool:
        """EAGLE-3.1 with both kinds of norms before `fc`, of which some engines apply one."""
        return self.norm_before_fc and self.fc_norm

    @property
    def partial_rotation(self) -> bool:
        """Only a part of every head is rotated; latent attention always has such a part."""
        return self.mla is None and self.rope.partial_rotary_factor != 1.0

    @property
    def parallel_drafting(self) -> bool:
        """P-EAGLE: all tokens of a proposal come from one forward pass; no step reads the output of another."""
        return self.algorithm == "p-eagle"

    @property
    def own_head(self) -> bool:
        """A head over the draft vocabulary; other drafts use the base's frozen head."""
        return self.reads_captures

    @property
    def is_module(self) -> bool:
        """MTP: one prediction module in DeepSeek-V3's form."""
        return self.algorithm == "eagle-mtp"

    @property
    def regresses_state(self) -> bool:
        """EAGLE-1: also trained by regression on the base's next final state."""
        return self.algorithm == "eagle1"

    @property
    def layer_options(self) -> tuple[str, ...]:
        """Options that a Llama decoder layer does not have; only the plain unroll computes them."""
        names = ("qk_norm", "attention_bias", "mlp_bias", "norm_before_residual")
        found = [name for name in names if getattr(self, name)]
        if self.partial_rotation or (self.mla is None and self.rope.attention_factor != 1.0):
            found.append("rope")
        if self.sliding_window is not None:
            found.append("sliding_window")
        return tuple(found)

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        _check_sizes(self)
        self._validate_layers()
        self.rope.check_draft()
        options = [n for n in ("norm_before_fc", "fc_norm", "norm_output") if getattr(self, n)]
        if self.algorithm == "eagle3.1":
            require(bool(options), "eagle3.1 without norm_before_fc, fc_norm and norm_output is eagle3: use eagle3")
        else:
            allowed = ["norm_output"] if self.is_module else []
            wrong = [n for n in options if n not in allowed]
            require(not wrong, f"{', '.join(wrong)}: options of eagle3.1, found with algorithm {self.algorithm}")
        own = [n for n in ("moe", "mla", "layer_in_base") if getattr(self, n) is not None]
        require(
            not own or (len(own) == 3 and self.algorithm == "eagle-mtp"),
            f"{', '.join(own)}: they are set together, by --mtp-from-base alone",
        )
        self._validate_mask_token()
        self._validate_starting_point()
        if not self.reads_captures:
            self._validate_shared_head()
        if self.mla is not None:
            require(
                not self.layer_options,
                f"a draft with latent attention has no {', '.join(self.layer_options)}: leave them out",
            )

    def _validate_mask_token(self) -> None:
        token = self.mask_token_id
        if not self.parallel_drafting:
            require(token is None, f"mask_token_id is an option of p-eagle, found with {self.algorithm}")
            return
        require(token is not None, "p-eagle needs mask_token_id")
        self._validate_mask_token_id(token or 0)

    def _validate_starting_point(self) -> None:
        require(
            self.sliding_window is None or (self.reads_captures and self.sliding_window >= 1),
            f"sliding_window is an option of EAGLE-3, at least 1; found {self.sliding_window} for {self.algorithm}",
        )
        require(
            not self.frozen_head or self.reads_captures,
            f"frozen_head is an option of EAGLE-3, found with {self.algorithm}",
        )
        require(
            not self.init_attention or self.mla is None,
            "init_attention does nothing for a draft with latent attention: leave it out",
        )
        require(not self.init_attention or self.init_from_base_layer, "init_attention needs init_from_base_layer")
        require(
            self.fc_init == "last_capture" or (self.reads_captures and self.hidden_size == self.target_hidden_size),
            f"fc_init {self.fc_init!r} is for drafts of the base's width that read captures: leave it out",
        )
        require(
            not self.frozen_head or self.hidden_size == self.target_hidden_size,
            f"frozen_head keeps rows of the base's head: hidden_size must be the base's {self.target_hidden_size}, "
            f"found {self.hidden_size}",
        )

    def _validate_shared_head(self) -> None:
        """Checks of drafts that read the base's final state and use its frozen LM head."""
        for name, expected in (("hidden_size", self.target_hidden_size), ("draft_vocab_size", self.vocab_size)):
            require(
                getattr(self, name) == expected,
                f"{self.algorithm} uses the base's own head: {name} must be the base's {expected}, found "
                f"{getattr(self, name)}",
            )
        require(
            not self.capture_layer_ids, f"{self.algorithm} reads the base's final state: leave capture_layer_ids out"
        )
        for name in ("norm_before_residual", "own_embed_tokens", *(("fc_bias",) if self.is_module else ())):
            require(not getattr(self, name), f"{name}: not for {self.algorithm}")
        require(
            not self.is_module or self.num_hidden_layers == 1,
            f"eagle-mtp is one module applied at every step: num_hidden_layers must be 1, found "
            f"{self.num_hidden_layers}",
        )


def _check_sizes(config: EagleConfig) -> None:
    ids = config.capture_layer_ids
    require(
        all(a < b for a, b in itertools.pairwise(ids)),
        f"capture_layer_ids must be distinct and ascending, found {list(ids)}",
    )
    config._validate_draft_vocab_size(config.draft_vocab_size)


@dataclass(frozen=True)
class MedusaConfig(Config):
    """Architecture of Medusa heads (arXiv 2401.10774). Built by `presets.medusa_config(base, ...)`."""

    num_heads: int
    """Number of heads; head i (from 0) predicts the token 2 + i positions ahead."""
    hidden_size: int
    """Of the base."""
    vocab_size: int
    """Vocabulary of the base and of every head."""
    num_layers: int = 1
    """Residual blocks per head."""
    share_base_head: bool = False
    """Use the base's frozen LM head after the blocks instead of a trained head each."""
    algorithm: Literal["medusa"] = "medusa"
    """Always medusa."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            require(getattr(self, name) >= 1, f"Medusa {name} must be at least 1, found {getattr(self, name)}")

    @property
    def capture_layer_ids(self) -> tuple[int, ...]:
        """Empty: heads read the base's final state."""
        return ()

    @property
    def draft_vocab_size(self) -> int:
        """The whole vocabulary."""
        return self.vocab_size

    reads_captures: ClassVar[bool] = False
    is_module: ClassVar[bool] = False
    regresses_state: ClassVar[bool] = False
    of_base: ClassVar[bool] = False
    own_embedding: ClassVar[bool] = False
    own_embed_tokens: ClassVar[bool] = False

    @property
    def target_hidden_size(self) -> int:
        """Width of the base."""
        return self.hidden_size

    @property
    def own_head(self) -> bool:
        """Every head has rows of its own, unless the base's are shared."""
        return not self.share_base_head


DraftConfig = EagleConfig | MedusaConfig | BlockConfig
