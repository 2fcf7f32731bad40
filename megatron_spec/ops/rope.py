"""Rotary embedding in the rotate-half convention of Llama, for arbitrary positions; shared by base and draft.

Scalings: default, linear, llama3 (the frequency-dependent scaling of Llama 3.1), yarn (arXiv 2309.00071), longrope
(arXiv 2402.13753). Equal to transformers in fp32. Rotates the first `partial_rotary_factor` of a head's dimensions.

longrope has two sets of frequencies. A text (a packed document, or a prompt with the answer so far) of more than
`original_max_position_embeddings` tokens uses the long set for all of its tokens, any other text the short set,
regardless of batch, packing and cache. When an answer grows past that length, the text is prefilled again
(decoding/engine.py), as in transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_spec.config import RopeConfig, UserError


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu", long: bool = False
) -> Tensor:
    """fp32 [rotary dimensions / 2] angular frequencies per position.

    Args:
        long: longrope's frequencies for texts beyond the original length.
    """
    dim = rope.rotary_dim(head_dim)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)
    if rope.type == "longrope":
        factors = rope.long_factor if long else rope.short_factor
        if len(factors) != dim // 2:
            raise UserError(f"longrope: found {len(factors)} factors, expected {dim // 2} (half the rotary dimensions)")
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * powers)
    inv = 1.0 / powers
    if rope.type == "linear":
        return inv / rope.factor
    if rope.type == "yarn":
        return _yarn(rope, powers, dim)
    return _llama3(rope, inv) if rope.type == "llama3" else inv


def _yarn(rope: RopeConfig, powers: Tensor, dim: int) -> Tensor:
    """High frequencies are kept, low ones are interpolated, with a ramp in between."""

    def dimension_of(turns: float) -> float:
        """Dimension pair that makes this many rotations over the trained length."""
        original = rope.original_max_position_embeddings
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32, device=powers.device) - low) / (high - low)).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(rope: RopeConfig, inv: Tensor) -> Tensor:
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
    """fp32 angles [S, B, 1, rotary dimensions], the layout of megatron-core's `rotary_pos_emb`.

    Args:
        inv_freq: [rotary dimensions / 2], or [S, B, rotary dimensions / 2] if rows differ.
    """
    half = positions_BS.t()[:, :, None].float() * inv_freq
    return torch.cat([half, half], dim=-1)[:, :, None, :]


def apply_rotary(x_SBND: Tensor, cos_SB1D: Tensor, sin_SB1D: Tensor) -> Tensor:
    """Rotate queries or keys; cos and sin are in the dtype of x."""
    a, b = x_SBND.chunk(2, dim=-1)
    return x_SBND * cos_SB1D + torch.cat([-b, a], dim=-1) * sin_SB1D
