"""MXFP4 tensors of gpt-oss, dequantised while they are read (OCP Microscaling Formats 1.0).

A matrix [E, R, C] is stored as NAME_blocks [E, R, C / 32, 16] (two E2M1 codes per byte, the low half first) and
NAME_scales [E, R, C / 32] (exponents with a bias of 127). The model's parameter is its transpose [E, C, R].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Values that share one scale."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Stored tensors of a parameter of shape [E, C, R]: name -> shape."""
    E, C, R = shape
    return {name + BLOCKS: (E, R, C // BLOCK, BLOCK // 2), name + SCALES: (E, R, C // BLOCK)}


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., R, G, 16] and [..., R, G] -> bf16 [..., R, 32 G]. Exact: a power of two times a small number."""
    table = torch.tensor([*_VALUES, *(-x for x in _VALUES)], dtype=torch.bfloat16)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales.int()[..., None] - 127).flatten(-2)


def read(
    read_raw: Callable[[str, int, int, int, slice], Tensor], name: str, dim: int, start: int, stop: int,
    experts: slice = slice(None),
) -> Tensor:  # fmt: skip
    """The slice [start, stop) of dimension `dim` of the parameter [E, C, R], limited to `experts` if `dim` is not 0.

    Only the blocks it touches are read.
    """
    if dim == 1:  # columns of the stored matrix, in units of blocks
        first, last = start // BLOCK, -(-stop // BLOCK)
        part = dequantize(*(read_raw(name + kind, 2, first, last, experts) for kind in (BLOCKS, SCALES)))
        part = part[..., start - first * BLOCK : stop - first * BLOCK]
    else:
        stored = 0 if dim == 0 else 1
        part = dequantize(*(read_raw(name + kind, stored, start, stop, experts) for kind in (BLOCKS, SCALES)))
    return part.transpose(1, 2)
