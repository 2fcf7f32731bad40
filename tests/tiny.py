"""Tiny random models and batches for tests: made by transformers, seeded, a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_spec.batch import Batch


def save_llama(folder: Path, **overrides: Any) -> Path:
    """A random LlamaForCausalLM in Hugging Face format. Weights are large enough to make logits of scale ~1-10."""
    from transformers import LlamaConfig, LlamaForCausalLM

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
    values.update(overrides)
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
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
