"""Architecture of a base model, as its folder describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron_spec.config.core import Config, require

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
RouterKind = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True)
class RopeConfig(Config):
    """Rotary embedding, in the terms of a Hugging Face config.json."""

    theta: float = 10000.0
    """Base of the frequencies."""
    type: RopeType = "default"
    """How frequencies are scaled for long contexts."""
    factor: float = 1.0
    """linear, llama3, yarn: ratio of the long to the original context."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position_embeddings / this are scaled by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position_embeddings / this stay as they are."""
    original_max_position_embeddings: int = 8192
    """Positions of the training before it was extended."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that is rotated (the first ones)."""
    attention_factor: float = 1.0
    """yarn, longrope: the rotary dimensions of queries and keys are scaled by this."""
    beta_fast: float = 32.0
    """yarn: dimensions that rotate more often than this over the original context are not scaled."""
    beta_slow: float = 1.0
    """yarn: dimensions that rotate less often than this over the original context are scaled by `factor`."""
    truncate: bool = True
    """yarn: round the two limits to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in texts of up to the original number of positions."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same for every token of a longer text."""

    def check_draft(self) -> None:
        """Raise UserError for what no draft computes: its attention has one set of frequencies for all texts."""
        require(self.type != "longrope", "a draft cannot have rope type longrope: use default, linear, llama3 or yarn")

    @property
    def longest_short(self) -> int | None:
        """longrope: most tokens of a text that is read with the short factors; None: one set of factors for all."""
        return self.original_max_position_embeddings if self.type == "longrope" else None

    def rotary_dim(self, head_dim: int) -> int:
        """Rotary dimensions of a head."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class MoeConfig(Config):
    """Mixture-of-experts MLP of a base."""

    num_experts: int
    """Routed experts of a layer."""
    experts_per_token: int
    """Routed experts that a token passes."""
    intermediate_size: int
    """Width of one expert."""
    router: RouterKind = "softmax"
    """What becomes of the router's logits; `softmax_of_chosen` normalises after the choice."""
    normalize: bool = True
    """Weights of the chosen experts add up to 1 (before `scale`)."""
    scale: float = 1.0
    """Factor of the routed experts' output."""
    groups: int = 1
    """Groups of experts; a token chooses among the experts of some groups only."""
    groups_per_token: int = 1
    """Groups that a token chooses."""
    choice_bias: bool = False
    """A bias per expert that counts for the choice only (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token passes; 0: none."""
    bias: bool = False
    """Router and experts have biases (gpt-oss)."""
    clamp: float = 0.0
    """gpt-oss: gate and up are clamped to this, and the activation is gate * sigmoid(alpha * gate) * (up + 1)."""
    alpha: float = 1.702
    """gpt-oss: see `clamp`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        require(
            1 <= self.experts_per_token <= self.num_experts,
            f"num_experts_per_tok {self.experts_per_token} does not fit the {self.num_experts} experts",
        )
        require(
            self.groups >= 1 and self.num_experts % self.groups == 0,
            f"{self.num_experts} experts do not fill {self.groups} groups (n_group)",
        )
        if self.groups > 1:
            self._check_groups(self.num_experts // self.groups)

    def _check_groups(self, size: int) -> None:
        require(
            size >= 2,
            f"n_group {self.groups}: groups of one expert, expected two or more: the best two scores of a group count",
        )
        require(
            1 <= self.groups_per_token <= self.groups,
            f"topk_group {self.groups_per_token}: expected 1 to {self.groups} groups of experts",
        )
        require(
            self.experts_per_token <= self.groups_per_token * size,
            f"num_experts_per_tok {self.experts_per_token} does not fit topk_group {self.groups_per_token}, groups of "
            f"{size} experts",
        )


@dataclass(frozen=True)
class MlaConfig(Config):
    """Multi-head latent attention of a base (DeepSeek)."""

    kv_lora_rank: int
    """Width of the compressed keys and values."""
    nope_head_dim: int
    """Non-rotary dimensions of a query or key head; `head_dim` is these plus `rope_head_dim`."""
    rope_head_dim: int
    """Rotary dimensions of a query or key head."""
    v_head_dim: int
    """Dimensions of a value head."""
    q_lora_rank: int | None = None
    """Width of the compressed queries; None: queries are not compressed."""
    score_factor: float = 1.0
    """Scores are multiplied by this (yarn's mscale, squared)."""
    interleaved: bool = True
    """Rotary dimensions lie in pairs (0, 1), (2, 3), ... instead of halves."""


@dataclass(frozen=True)
class BaseConfig(Config):
    """Architecture of the frozen base, derived from its config.json and never written by hand."""

    SETTLED: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    family: str
    """Name of its kind, a key of `families`."""
    hidden_size: int
    """Width H of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Decoder layers L."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Dimensions of a query or key head."""
    vocab_size: int
    """True vocabulary V, without padding."""
    max_position_embeddings: int
    """Longest sequence."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the norms."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding."""
    tie_word_embeddings: bool = False
    """The LM head is the embedding."""
    attention_bias: bool = False
    """Biases on q, k, v and the output projection."""
    mlp_bias: bool = False
    """Biases on the projections of the MLP."""
    torch_dtype: str = "bfloat16"
    """Type of the weights on disk."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    pad_token_id: int | None = None
    """Token that fills rows."""
    qkv_bias: bool = False
    """Biases on q, k and v alone (Qwen 2)."""
    qk_norm: bool = False
    """A norm over each query and key head (Qwen 3)."""
    attention_sinks: bool = False
    """A learned score per query head that takes part in the softmax and has no value (gpt-oss)."""
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it."""
    window_layers: tuple[int, ...] = ()
    """Layers with the window."""
    moe: MoeConfig | None = None
    """Mixture of experts; None: dense MLPs."""
    mla: MlaConfig | None = None
    """Latent attention; None: ordinary attention."""
    mtp_layers: int = 0
    """Prediction modules after the last layer that the base ships (DeepSeek-V3)."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense base."""
        return self.moe.num_experts if self.moe else 0

    @property
    def num_experts_per_token(self) -> int:
        """Routed experts a token passes."""
        return self.moe.experts_per_token if self.moe else 0

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer; None where it sees everything before it."""
        return self.window if layer in self.window_layers else None

    def has_experts(self, layer: int) -> bool:
        """True for a layer with a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
