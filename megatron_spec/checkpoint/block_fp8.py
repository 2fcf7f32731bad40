"""Weights in fp8 with a scale per block, dequantised while they are read (DeepSeek-V3, arXiv 2412.19437, section 3.3).

A matrix [R, C] is stored in E4M3 as NAME, beside NAME_scale_inv [ceil(R / BR), ceil(C / BC)] in fp32: what the values
of a block of BR x BC (128 x 128) are multiplied by. Blocks at the lower and right edge may be cut off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SCALES = "_scale_inv"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def read(
    read_raw: Callable[[str, int, int, int], Tensor], name: str, block: tuple[int, int], dim: int, start: int, stop: int
) -> Tensor:
    """fp32 slice [start, stop) of a dimension; only the scales of the blocks it touches are read."""
    codes, size = read_raw(name, dim, start, stop), block[dim]
    scales = read_raw(name + SCALES, dim, start // size, -(-stop // size)).float()
    for d in (0, 1):
        scales = scales.repeat_interleave(block[d], d)
        scales = scales.narrow(d, start % size if d == dim else 0, codes.shape[d])
    return codes.to(torch.float32) * scales
