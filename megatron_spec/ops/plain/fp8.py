"""Plain twins of `ops.kernels.fp8`.

R rows, H hidden, M intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.ops.fp8 import LARGEST, SMALLEST, Fp8Matrix
from megatron_spec.ops.plain.rows import gated_forward, norm_forward


def quantize(x_RH: Tensor) -> Fp8Matrix:
    """`kernels.fp8.quantize`."""
    scale = x_RH.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    values = (x_RH / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Matrix(values, scale)


def quantized_norm(a_RH: Tensor, b_RH: Tensor | None, sum_RH: Tensor | None, weight_H: Tensor, eps: float) -> Fp8Matrix:
    """`kernels.fp8.quantized_norm`."""
    normed = torch.empty_like(a_RH)
    norm_forward(a_RH, eps, b_RH, sum_RH, (weight_H, normed))
    return quantize(normed)


def quantized_gate(x_RX: Tensor) -> Fp8Matrix:
    """`kernels.fp8.quantized_gate`."""
    h_RM = x_RX.new_empty(len(x_RX), x_RX.shape[1] // 2)
    gated_forward(x_RX, h_RM)
    return quantize(h_RM)


def product(
    x: Fp8Matrix, weight: Fp8Matrix, dtype: torch.dtype, out: Tensor | None = None, fast: bool = True
) -> Tensor:
    """`kernels.fp8.product`."""
    wide = torch.promote_types(dtype, torch.float32)
    found = (x.dequantized(wide) @ weight.dequantized(wide).t()).to(dtype)
    return found if out is None else out.copy_(found)


def transpose(values_RH: Tensor, out_HR: Tensor) -> None:
    """`kernels.fp8.transpose`."""
    out_HR.copy_(values_RH.t())


def quantize_columns(x_RH: Tensor, scale_R: Tensor, out: Fp8Matrix) -> None:
    """`kernels.fp8.quantize_columns`."""
    found = quantize((x_RH * scale_R[:, None]).t())
    out.values[:, : len(x_RH)].copy_(found.values)
    out.scale.copy_(found.scale)
