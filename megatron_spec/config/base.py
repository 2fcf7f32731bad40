"""Architecture of a base model, as its folder describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_spec.config.core import Config, require

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
RouterKind = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True)
class RopeConfig(Config):
    """Rotary embedding, in the terms of a Hugging Face config.json."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that turns (the first ones)."""
    attention_factor: float = 1.0
    """yarn, longrope: scales the rotary dimensions of queries and keys."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies up to the original number of positions."""
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class MoeConfig(Config):
    """Mixture-of-experts MLP of a base."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    router: RouterKind = "softmax"
    """What becomes of the router's logits; `softmax_of_chosen` normalises after the choice."""
    normalize: bool = True
    """Weights of the chosen experts add up to 1 (before `scale`)."""
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    choice_bias: bool = False
    """A bias per expert that counts for the choice only (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token passes; 0: none."""
    bias: bool = False
    """Router and experts have biases (gpt-oss)."""
    clamp: float = 0.0
    """gpt-oss: gate and up are clamped to this, and the activation is gate * sigmoid(alpha * gate) * (up + 1)."""
    alpha: float = 1.702
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP."""

    def validate(self) -> None:
        """Raise UserError when fields are out of range or contradict one another."""
        require(
            1 <= self.experts_per_token <= self.num_experts,
            f"num_experts_per_tok {self.experts_per_token} does not fit the {self.num_experts} experts",
        )
        require(self.num_experts % self.groups == 0, f"{self.num_experts} experts do not fill {self.groups} groups")


@dataclass(frozen=True)
class MlaConfig(Config):
    """Multi-head latent attention of a base (DeepSeek)."""

    kv_lora_rank: int
    nope_head_dim: int
    """Dimensions of a query or key head that do not turn; `head_dim` is these and `rope_head_dim`."""
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    score_factor: float = 1.0
    """Scores are multiplied by this (yarn's mscale, squared)."""
    interleaved: bool = True
    """Rotary dimensions are paired (0, 1), (2, 3), ... instead of (i, i + half)."""


@dataclass(frozen=True)
class BaseConfig(Config):
    """Architecture of the frozen base, derived from its config.json and never written by hand."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """True vocabulary V: never the padded one."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k, v and the output projection."""
    mlp_bias: bool = False
    hidden_act: str = "silu"
    torch_dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
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
    mla: MlaConfig | None = None
    mtp_layers: int = 0
    """Prediction modules that the base ships after its last layer (DeepSeek-V3)."""

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
