"""NVFP4 weights: E2M1 codes in blocks of 16 along the input, an E4M3 scale per block, one fp32 scale per tensor.

value = code * block scale * global scale, where global = amax / (6 * 448) and a block's scale is the E4M3 number
nearest to its largest magnitude / 6 / global. Two codes share a byte, the first one in the low half. As with fp8,
training uses exactly the values of the exported codes.

O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight magnitudes of E2M1."""
_UP = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between two magnitudes, and whether a value at the midpoint rounds up (ties to even)."""
_GLOBAL = E2M1_MAX * 448.0


def global_scale(amax: Tensor) -> Tensor:
    """fp32 scale of the whole tensor; 1 for a tensor of zeros."""
    amax = amax.detach().float()
    scale = (amax / torch.full_like(amax, _GLOBAL)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def encode(weight_OI: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [O, I / 16, 16], sign in bit 3; block scales float8_e4m3fn [O, I / 16]) with the range `amax`."""
    blocks = weight_OI.detach().float().unflatten(-1, (-1, BLOCK))
    whole = global_scale(amax)
    scale = (blocks.abs().amax(-1) / E2M1_MAX / whole).clamp(max=448.0).to(torch.float8_e4m3fn)
    step = (scale.float() * whole)[..., None]
    y = torch.where(step == 0, torch.zeros_like(blocks), blocks / torch.where(step == 0, torch.ones_like(step), step))
    size = y.abs()
    codes = torch.zeros_like(y, dtype=torch.uint8)
    for bound, tie_up in _UP:
        codes += size >= bound if tie_up else size > bound
    return codes | (torch.signbit(y) & (codes > 0)).to(torch.uint8) << 3, scale


def decode(codes: Tensor, scale: Tensor, whole: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[O, I] from `encode`'s codes and block scales and a global scale."""
    table = torch.tensor(VALUES, device=codes.device)
    values = table[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    return (values * scale.float()[..., None] * whole).flatten(-2).to(dtype)


def round_trip(weight_OI: Tensor, amax: Tensor) -> Tensor:
    """The weight rounded to its codes, in its dtype. NaN stays NaN."""
    codes, scale = encode(weight_OI, amax)
    rounded = decode(codes, scale, global_scale(amax), weight_OI.dtype)
    return torch.where(weight_OI.isnan(), weight_OI.detach(), rounded)


def pack(codes: Tensor) -> Tensor:
    """uint8 [O, I / 2]: two codes per byte, the first in the low half."""
    flat = codes.flatten(-2)
    return flat[..., 0::2] | flat[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: [O, I / 16, 16]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).unflatten(-1, (-1, BLOCK))
