"""Rotary embedding in the rotate-half convention of Llama, for arbitrary positions (base and draft share it).

Scalings: default, linear, llama3 (the frequency-dependent scaling of Llama 3.1). Equal to transformers' in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_spec.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [head_dim / 2] angular frequencies per position."""
    inv = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim))
    if rope.type == "linear":
        return inv / rope.factor
    if rope.type != "llama3":
        return inv
    low = rope.original_max_position_embeddings / rope.low_freq_factor
    high = rope.original_max_position_embeddings / rope.high_freq_factor
    wavelength = 2 * math.pi / inv
    smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inv / rope.factor + smooth * inv
    scaled = torch.where(wavelength > low, inv / rope.factor, inv)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def rotary_angles(positions_BS: Tensor, inv_freq: Tensor) -> Tensor:
    """fp32 angles [S, B, 1, head_dim], the layout of megatron-core's `rotary_pos_emb`."""
    half = positions_BS.t()[:, :, None].float() * inv_freq
    return torch.cat([half, half], dim=-1)[:, :, None, :]


def apply_rotary(x_SBND: Tensor, cos_SB1D: Tensor, sin_SB1D: Tensor) -> Tensor:
    """Rotate queries or keys; cos and sin are in the dtype of x."""
    a, b = x_SBND.chunk(2, dim=-1)
    return x_SBND * cos_SB1D + torch.cat([-b, a], dim=-1) * sin_SB1D
