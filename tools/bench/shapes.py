"""Shapes of bases that the benchmarks build with random weights (`BaseConfig`; figures of the models' config.json)."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import BaseConfig

_LLAMA: dict[str, Any] = dict(
    family="llama", vocab_size=128256, max_position_embeddings=131072, head_dim=128, num_key_value_heads=8,
    rope={"theta": 500000.0, "type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        family="llama", hidden_size=128, intermediate_size=256, num_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, vocab_size=512, max_position_embeddings=512,
    ),
    "llama-3.2-3b": dict(
        _LLAMA, hidden_size=3072, intermediate_size=8192, num_layers=28, num_attention_heads=24,
    ),
    "llama-3.1-8b": dict(
        _LLAMA, hidden_size=4096, intermediate_size=14336, num_layers=32, num_attention_heads=32,
    ),
    "llama-3.1-70b": dict(
        _LLAMA, hidden_size=8192, intermediate_size=28672, num_layers=80, num_attention_heads=64,
    ),
    "qwen2.5-7b": dict(
        family="qwen2", hidden_size=3584, intermediate_size=18944, num_layers=28, num_attention_heads=28,
        num_key_value_heads=4, head_dim=128, vocab_size=152064, max_position_embeddings=131072,
        rope={"theta": 1000000.0}, qkv_bias=True,
    ),
    "qwen3-8b": dict(
        family="qwen3", hidden_size=4096, intermediate_size=12288, num_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rope={"theta": 1000000.0}, qk_norm=True,
    ),
}  # fmt: skip


def base_shape(name: str) -> BaseConfig:
    """One of `SHAPES`."""
    return BaseConfig.from_dict(SHAPES[name])
