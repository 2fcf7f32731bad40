"""Tiny random models and batches for tests: made by transformers, seeded, a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_spec.batch import Batch
from megatron_spec.config import BaseConfig


def _shape(**overrides: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    return {**values, **overrides}


def llama(**overrides: Any) -> BaseConfig:
    """The configuration of `save_llama`, but for `overrides`."""
    values: dict[str, Any] = dict(
        family="llama",
        hidden_size=32,
        intermediate_size=48,
        num_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        max_position_embeddings=256,
    )
    return BaseConfig(**{**values, **overrides})


def save_llama(folder: Path, **overrides: Any) -> Path:
    """A random LlamaForCausalLM in Hugging Face format. Weights are large enough to make logits of scale ~1-10."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**_shape(**overrides))).save_pretrained(folder)
    return folder


def save_mixtral(folder: Path, **overrides: Any) -> Path:
    """The same shape with four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    MixtralForCausalLM(MixtralConfig(**_shape(**experts, **overrides))).save_pretrained(folder)
    return folder


def make_batch(rows: int, length: int, seed: int, vocab_size: int = 96) -> Batch:
    """A batch of two-turn conversations with padding behind some rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator)
    turns = torch.zeros(rows, length, dtype=torch.int32)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    for r in range(rows):
        end = length - (3 * r) % 7
        turns[r, 3 : length // 2] = 1
        turns[r, length // 2 + 4 : end] = 2
        documents[r, end:] = -1
    positions = torch.arange(length).expand(rows, length).clone()
    return Batch(tokens, positions, turns, documents)
