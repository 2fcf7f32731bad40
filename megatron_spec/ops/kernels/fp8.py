"""Matrix products in real fp8 (E4M3), and the kernels that round their operands: one scale per row of each.

The scale of a row is computed in the kernel that produces the row. Products run on the tensor cores at twice the bf16
rate (compute capability 8.9 and newer).

R rows, H hidden, M intermediate, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.fp8 import LARGEST, SMALLEST, Fp8Matrix


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


def quantized_norm(a_RH: Tensor, b_RH: Tensor | None, sum_RH: Tensor | None, weight_H: Tensor, eps: float) -> Fp8Matrix:
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


def quantized_gate(x_RX: Tensor) -> Fp8Matrix:
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


@triton.jit(do_not_specialize=["R"])
def _column_peaks_kernel(x_ptr, scale_ptr, peak_ptr, R, H, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest magnitude of scale * x in every column, over the rows of one program."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    peak = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS):
        row = (start + rows).to(tl.int64)
        there = (row < R)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + row[:, None] * H + cols[None, :], mask=there, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < R, other=0.0)
        peak = tl.maximum(peak, tl.abs(x * scale[:, None]))
    tl.store(peak_ptr + tl.program_id(1) * H + cols, tl.max(peak, axis=0), mask=cols < H)


@triton.jit(do_not_specialize=["R"])
def _columns_kernel(
    x_ptr, row_scale_ptr, column_scale_ptr, out_ptr, out_stride, R, H, SCALED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A tile of x, transposed; SCALED: times the scales of its rows, divided by those of its columns and rounded."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    col = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row[:, None] * H + col[None, :], mask=(row < R)[:, None] & (col < H)[None, :], other=0)
    if SCALED:
        y = x.to(tl.float32) * tl.load(row_scale_ptr + row, mask=row < R, other=0.0)[:, None]
        y = y / tl.load(column_scale_ptr + col, mask=col < H, other=1.0)[None, :]
        x = tl.minimum(tl.maximum(y, -448.0), 448.0).to(out_ptr.dtype.element_ty)
    out_at, inside = out_ptr + col[:, None] * out_stride + row[None, :], (col < H)[:, None]
    if (tl.program_id(0) + 1) * TILE <= R:  # 16 bytes at once; a mask of any number of rows allows one
        tl.store(out_at, tl.trans(x), mask=inside)
    else:
        tl.store(out_at, tl.trans(x), mask=inside & (row < R)[None, :])


_TILE, _PROGRAMS = 128, 64


def transpose(values_RH: Tensor, out_HR: Tensor) -> None:
    """Copy E4M3 values [R, H] to [H, R], whose rows may be part of longer ones."""
    R, H = values_RH.shape
    raw, out = values_RH.view(torch.uint8), out_HR.view(torch.uint8)
    if R:
        _columns_kernel[(triton.cdiv(R, _TILE), triton.cdiv(H, _TILE))](
            raw, raw, raw, out, out.stride(0), R, H, False, _TILE, num_warps=8
        )


def quantize_columns(x_RH: Tensor, scale_R: Tensor, out: Fp8Matrix) -> None:
    """Transpose scale * x (contiguous) and quantise it with one scale per column of x; out has [H, R or more] values,
    of which the first R are written."""
    R, H = x_RH.shape
    peaks = torch.zeros(_PROGRAMS, H, dtype=torch.float32, device=x_RH.device)
    _column_peaks_kernel[(triton.cdiv(H, 64), _PROGRAMS)](x_RH, scale_R, peaks, R, H, 32, 64, num_warps=4)
    torch.div(peaks.amax(0).clamp_(min=SMALLEST), LARGEST, out=out.scale)
    if R:
        _columns_kernel[(triton.cdiv(R, 64), triton.cdiv(H, 64))](
            x_RH, scale_R, out.scale, out.values, out.values.stride(0), R, H, True, 64, num_warps=8
        )
