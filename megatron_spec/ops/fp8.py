"""Matrices in real fp8 (E4M3) with one scale per row. Kernels: `ops/kernels/fp8.py`, plain twins: `ops/plain/fp8.py`.

The scale of a row is its largest magnitude / 448, found when the row is rounded: nothing is calibrated or delayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite E4M3 value."""
SMALLEST = 1e-12
"""Smallest magnitude that a scale is made for."""
MULTIPLE = 16
"""Products in fp8 need sizes that are multiples of this, except for the rows of the first operand."""


@dataclass
class Fp8Matrix:
    """values [R, H] in E4M3 and scale [R] in fp32: row r is values[r] * scale[r]."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> Fp8Matrix:
        """Uninitialised matrix, to be written by a kernel."""
        return Fp8Matrix(
            torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @staticmethod
    def of_weight(weight_OH: Tensor) -> Fp8Matrix:
        """Quantise a weight [O, H] with one scale per output channel."""
        scale = weight_OH.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
        values = (weight_OH.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return Fp8Matrix(values, scale)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantised matrix [R, H]."""
        return self.values.to(dtype) * self.scale[:, None].to(dtype)


def padded(size: int) -> int:
    """The next multiple of `MULTIPLE`."""
    return -(-size // MULTIPLE) * MULTIPLE
