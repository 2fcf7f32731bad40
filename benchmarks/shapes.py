"""Sizes of known bases (from the models' config.json), and of a small one of every family. No torch here."""

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
    "smollm2-135m": dict(
        family="llama", hidden_size=576, intermediate_size=1536, num_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192,
        rope={"theta": 100000.0}, tie_word_embeddings=True,
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
    "qwen2.5-0.5b": dict(
        family="qwen2", hidden_size=896, intermediate_size=4864, num_layers=24, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, vocab_size=151936, max_position_embeddings=32768,
        rope={"theta": 1000000.0}, qkv_bias=True, tie_word_embeddings=True,
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
    "qwen3-30b-a3b": dict(
        family="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rope={"theta": 1000000.0}, qk_norm=True,
        moe=dict(num_experts=128, experts_per_token=8, intermediate_size=768),
    ),
    "tiny-moe": dict(
        family="mixtral", hidden_size=128, intermediate_size=256, num_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, vocab_size=512, max_position_embeddings=512,
        moe=dict(num_experts=4, experts_per_token=2, intermediate_size=256),
    ),
}  # fmt: skip

_SMALL: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    vocab_size=512, max_position_embeddings=1024,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(num_experts=8, experts_per_token=2, intermediate_size=256)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(window=64, window_layers=[0, 1, 2, 3]),
    "phi3": dict(rope=dict(partial_rotary_factor=0.75)),
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True, head_dim=128),
    "mixtral": dict(intermediate_size=256, moe=_EXPERTS),
    "qwen3_moe": dict(qk_norm=True, moe=dict(_EXPERTS, dense_layers=[1])),
    "gpt_oss": dict(
        attention_bias=True, attention_sinks=True, window=64, window_layers=[0, 2],
        moe=dict(_EXPERTS, router="softmax_of_chosen", bias=True, clamp=7.0),
    ),
    "deepseek_v3": dict(
        num_key_value_heads=8, head_dim=192,
        mla=dict(kv_lora_rank=128, nope_head_dim=128, rope_head_dim=64, v_head_dim=128, q_lora_rank=128),
        moe=dict(_EXPERTS, router="sigmoid", choice_bias=True, shared_intermediate_size=256, dense_layers=[0]),
    ),
}  # fmt: skip
"""Family -> what a small base of it adds to a small Llama: one with every module of the family."""


def family_shape(family: str) -> BaseConfig:
    """The configuration of one of `FAMILIES`."""
    return BaseConfig.from_dict({**_SMALL, "family": family, **FAMILIES[family]})


def base_shape(name: str) -> BaseConfig:
    """The configuration of one of `SHAPES`."""
    return BaseConfig.from_dict(SHAPES[name])
