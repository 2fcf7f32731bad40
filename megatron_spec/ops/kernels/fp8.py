"""Matrix products in real fp8 (E4M3) for frozen weights: one scale per output channel and per input row.

The scale of a row is its largest magnitude / 448, computed in the kernel that produces the row, so no scale is
calibrated or delayed. Products run on the tensor cores at twice the bf16 rate (compute capability 8.9 and newer).

R rows, H hidden, M intermediate, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0
"""Largest finite E4M3 value."""


@dataclass
class Fp8Matrix:
    """values [R, H] in E4M3 and scale [R] in fp32: row r is values[r] * scale[r]."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> Fp8Matrix:
        """Uninitialised matrix, to be written by one of the kernels below."""
        return Fp8Matrix(
            torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @staticmethod
    def of_weight(weight_OH: Tensor) -> Fp8Matrix:
        """Quantise a weight [O, H] with one scale per output channel."""
        scale = weight_OH.abs().amax(1).float().clamp(min=1e-12) / LARGEST
        values = (weight_OH.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return Fp8Matrix(values, scale)

    def dequantized(self) -> Tensor:
        """Dequantised matrix, fp32 [R, H]."""
        return self.values.float() * self.scale[:, None]


def product(
    x: Fp8Matrix, weight: Fp8Matrix, dtype: torch.dtype, out: Tensor | None = None, fast: bool = True
) -> Tensor:
    """x [R, H] @ weight [O, H]^T: [R, O]; `fast` keeps fewer bits of partial sums."""
    operands = (x.values, weight.values.t(), x.scale[:, None], weight.scale[None, :])
    if out is None:
        out = torch.empty(len(x.values), len(weight.values), dtype=dtype, device=x.values.device)
    torch._scaled_mm(*operands, out_dtype=dtype, use_fast_accum=fast, out=out)
    return out


@triton.jit
def _store_row(y, mask, row, width, cols, out_ptr, scale_ptr):  # type: ignore[no-untyped-def]
    scale = tl.maximum(tl.max(tl.where(mask, tl.abs(y), 0.0), axis=0), 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    q = tl.minimum(tl.maximum(y / scale, -448.0), 448.0)
    tl.store(out_ptr + row * width + cols, q.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_kernel(
    a_ptr, b_ptr, sum_ptr, w_ptr, out_ptr, scale_ptr, H, eps, HAS_B: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    x = tl.load(a_ptr + row * H + cols, mask=mask, other=0.0)
    if HAS_B:
        b = tl.load(b_ptr + row * H + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + b.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * H + cols, x, mask=mask)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    _store_row(wide * rstd * w, mask, row, H, cols, out_ptr, scale_ptr)


def norm(a_RH: Tensor, b_RH: Tensor | None, sum_RH: Tensor | None, weight_H: Tensor, eps: float) -> Fp8Matrix:
    """RMS norm of a (+ b; the sum is written to `sum_RH`), quantised."""
    R, H = a_RH.shape
    out = Fp8Matrix.empty(R, H, a_RH.device)
    _norm_kernel[(R,)](
        a_RH, a_RH if b_RH is None else b_RH, a_RH if sum_RH is None else sum_RH, weight_H, out.values, out.scale, H,
        eps, b_RH is not None, triton.next_power_of_2(H), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(x_ptr, out_ptr, scale_ptr, M, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < M
    gate = tl.load(x_ptr + row * 2 * M + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * M + M + cols, mask=mask, other=0.0).to(tl.float32)
    _store_row(gate * up / (1.0 + tl.exp(-gate)), mask, row, M, cols, out_ptr, scale_ptr)


def gated(x_RX: Tensor) -> Fp8Matrix:
    """silu(gate) * up of x = [gate | up] [R, 2M], quantised."""
    R, M = x_RX.shape[0], x_RX.shape[1] // 2
    out = Fp8Matrix.empty(R, M, x_RX.device)
    block = triton.next_power_of_2(M)
    _gated_kernel[(R,)](x_RX, out.values, out.scale, M, block, num_warps=16 if block > 4096 else 4)
    return out


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, H, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    x = tl.load(x_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
    _store_row(x, mask, row, H, cols, out_ptr, scale_ptr)


def quantize(x_RH: Tensor) -> Fp8Matrix:
    """Quantise x (contiguous) with one scale per row."""
    R, H = x_RH.shape
    out = Fp8Matrix.empty(R, H, x_RH.device)
    block = triton.next_power_of_2(H)
    _quantize_kernel[(R,)](x_RH.contiguous(), out.values, out.scale, H, block, num_warps=16 if block > 8192 else 8)
    return out
