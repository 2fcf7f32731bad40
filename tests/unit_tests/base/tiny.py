"""Random tiny Llamas in Hugging Face format, and transformers' results for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 83,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def save_tiny(folder: Path, seed: int = 0, max_shard_size: str = "50GB", **overrides: Any) -> LlamaForCausalLM:
    """Write a random Llama (`SHAPE` and `overrides`) and return it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **overrides})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def gap(found_SBX: Tensor, expected_BSX: Tensor) -> float:
    """Largest difference, without vocabulary padding."""
    return float((found_SBX.transpose(0, 1)[..., : expected_BSX.shape[-1]] - expected_BSX).abs().max())
