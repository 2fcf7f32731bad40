"""Fields that every draft made of decoder layers has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron_spec.config.base import RopeConfig
from megatron_spec.config.core import Config, require


@dataclass(frozen=True, kw_only=True)
class DecoderDraftConfig(Config):
    """Architecture shared by EAGLE, MTP and block drafts. Names follow the exported config.json where it has one."""

    SETTLED: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}

    hidden_size: int
    """Width of the draft."""
    intermediate_size: int
    """Width of its MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Dimensions of a head."""
    vocab_size: int
    """Target vocabulary V."""
    max_position_embeddings: int
    """Longest sequence."""
    num_hidden_layers: int
    """Decoder layers of the draft."""
    rms_norm_eps: float
    """Epsilon of the norms."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding."""
    initializer_range: float = 0.02
    """Standard deviation of newly initialised matrices."""
    fc_init: Literal["last_capture", "average"] = "last_capture"
    """Initial value of `fc`: it outputs the last capture, or the average of the captures."""
    init_from_base_layer: bool = False
    """Copy MLP and norms of the first draft layer from the base's last layer where shapes agree."""

    def _validate_layers(self) -> None:
        sizes = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "num_hidden_layers",
        )  # fmt: skip
        for name in sizes:
            require(getattr(self, name) >= 1, f"draft {name} must be at least 1, found {getattr(self, name)}")
        require(self.rms_norm_eps > 0, f"draft rms_norm_eps must be positive, found {self.rms_norm_eps}")
        require(self.initializer_range >= 0, f"initializer_range must not be negative, found {self.initializer_range}")
        require(self.rope.theta > 0, f"draft rope_theta must be positive, found {self.rope.theta}")
        require(
            self.rope.rotary_dim(self.head_dim) % 2 == 0,
            f"draft head_dim {self.head_dim} must be even: dimensions are rotated in pairs",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"draft num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{self.num_key_value_heads}",
        )

    def _validate_draft_vocab_size(self, size: int) -> None:
        require(
            0 < size <= self.vocab_size,
            f"draft_vocab_size {size} must be between 1 and the base's vocabulary {self.vocab_size}",
        )

    def _validate_mask_token_id(self, token: int) -> None:
        require(
            0 <= token < self.vocab_size,
            f"mask_token_id {token} is not in the base's vocabulary of {self.vocab_size} tokens",
        )
