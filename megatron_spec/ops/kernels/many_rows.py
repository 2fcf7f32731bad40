"""Triton products of many rows that compute in a tile what would be another pass over memory: the gate, or each row's
largest logit and log-sum-exp.

Persistent programs, one per multiprocessor, with tiles read and written by Hopper's copy engine (tensor descriptors).
On an H200 the product itself is as fast as cuBLAS's. Kernels do not recompile for another number of rows.

R rows, H inputs, M intermediate, V columns of logits, N tiles of columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.loss import largest, per_row
from megatron_spec.ops.kernels.rows import gated_forward

MANY = 1024
"""Rows from which on these products are faster than cuBLAS's and another pass."""
MANY_INPUTS = 2048
"""Inputs from which on `largest_product` is: a tile's sums take as long whatever its product takes."""
LOG2_E = math.log2(math.e)
ROWS, COLUMNS, INPUTS = 128, 256, 64
"""Of a tile: its accumulators fill the registers of eight warps."""
GROUP = 16
"""Tiles of rows that are computed for one tile of columns after another, so that both stay in the L2 cache."""
LOW = tl.constexpr(-1.0e30)  # finite, so that columns outside the matrix, and those of -inf, add 0 instead of NaN


@triton.jit
def _tile(index, R, V, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """(first row, first column) of the tile computed as number `index`."""
    per_group = GROUP * tl.cdiv(V, COLUMNS)
    first = index // per_group * GROUP
    size = tl.minimum(tl.cdiv(R, ROWS) - first, GROUP)
    return (first + index % per_group % size) * ROWS, index % per_group // size * COLUMNS


@triton.jit
def _halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of a tile; each thread has both of its own."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["R"])
def _gated_kernel(
    x_at, weight_at, gate_up_at, out_at, R, M, H, PROGRAMS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    tiles = tl.cdiv(R, ROWS) * tl.cdiv(2 * M, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        row, col = _tile(index, R, 2 * M, ROWS, COLUMNS, GROUP)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for h in range(0, H, INPUTS):
            weight = weight_at.load([0, col // 2, h]).reshape(COLUMNS, INPUTS)  # gate and up of the same columns
            acc = tl.dot(x_at.load([row, h]), weight.T, acc)
        gate, up = _halves(acc, ROWS, COLUMNS)
        if KEEP:
            gate_up_at.store([row, 0, col // 2], gate.to(gate_up_at.dtype).reshape(ROWS, 1, HALF))
            gate_up_at.store([row, 1, col // 2], up.to(gate_up_at.dtype).reshape(ROWS, 1, HALF))
        out_at.store([row, col // 2], (gate / (1.0 + tl.exp(-gate)) * up).to(out_at.dtype))


def _suits(x_RH: Tensor, *others: Tensor) -> bool:
    """True for many rows, if the rows of all tensors start at multiples of 16 bytes, as the copy engine needs."""
    if len(x_RH) < MANY:
        return False
    return all(x.stride(1) == 1 and not (x.data_ptr() | x.stride(0) * x.element_size()) % 16 for x in (x_RH, *others))


def _in_tiles(x: Tensor, tile: list[int]) -> Any:
    """x as the copy engine reads or writes it."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # not in old Triton, where the path is off

    return TensorDescriptor.from_tensor(x, tile)


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


_TILES: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INPUTS": INPUTS, "GROUP": GROUP}


def gated_product(x_RH: Tensor, weight_XH: Tensor, out_RM: Tensor, gate_up_RX: Tensor | None = None) -> None:
    """out = silu(gate) * up with [gate | up] = x W^T [R, 2M], kept in `gate_up_RX` if given."""
    (R, H), M = x_RH.shape, out_RM.shape[1]
    if not _suits(x_RH, weight_XH, out_RM):
        gate_up_RX = torch.mm(x_RH, weight_XH.t(), out=gate_up_RX)
        gated_forward(gate_up_RX, out_RM)
        return
    out_at = _in_tiles(out_RM, [ROWS, COLUMNS // 2])
    kept_at = out_at
    if gate_up_RX is not None:
        kept_at = _in_tiles(gate_up_RX.view(R, 2, M), [ROWS, 1, COLUMNS // 2])
    programs = _programs(x_RH.device)
    _gated_kernel[(programs,)](
        _in_tiles(x_RH, [ROWS, INPUTS]),
        _in_tiles(weight_XH.view(2, M, H), [2, COLUMNS // 2, INPUTS]),
        kept_at, out_at, R, M, H, programs, gate_up_RX is not None, **_TILES, num_warps=8, num_stages=3,
    )  # fmt: skip


@triton.jit
def _row_sums(z, col, V, per_log2, MASSES: tl.constexpr, UNEVEN: tl.constexpr, WIDTH: tl.constexpr):
    """(largest, sum of exp((z - largest) / temperature) if MASSES) of the rows of a part of a tile."""
    if UNEVEN:
        z = tl.where((col + tl.arange(0, WIDTH) < V)[None, :], z, LOW)
    top = tl.maximum(tl.max(z, axis=1), LOW)
    mass = top
    if MASSES and UNEVEN:  # exact where both are LOW, which a fused multiply-add of LOW * per_log2 is not
        mass = tl.sum(tl.exp2((z - top[:, None]) * per_log2), axis=1)
    elif MASSES:
        mass = tl.sum(tl.exp2(z * per_log2 - (top * per_log2)[:, None]), axis=1)
    return top, mass


@triton.jit(do_not_specialize=["R"])
def _largest_kernel(
    x_at, weight_at, out_at, top_ptr, mass_ptr, R, V, H, per_log2, PROGRAMS: tl.constexpr, MASSES: tl.constexpr,
    UNEVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    N = tl.cdiv(V, COLUMNS)
    for index in tl.range(tl.program_id(0), tl.cdiv(R, ROWS) * N, PROGRAMS, flatten=True):
        row, col = _tile(index, R, V, ROWS, COLUMNS, GROUP)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for h in range(0, H, INPUTS):
            acc = tl.dot(x_at.load([row, h]), weight_at.load([col, h]).T, acc)
        left, right = _halves(acc, ROWS, COLUMNS)
        left, right = left.to(out_at.dtype), right.to(out_at.dtype)  # the sums are those of the logits as stored
        out_at.store([row, col], left)
        out_at.store([row, col + HALF], right)
        top, mass = _row_sums(left.to(tl.float32), col, V, per_log2, MASSES, UNEVEN, HALF)
        top2, mass2 = _row_sums(right.to(tl.float32), col + HALF, V, per_log2, MASSES, UNEVEN, HALF)
        both = tl.maximum(top, top2)
        rows = row + tl.arange(0, ROWS)
        at, mask = rows.to(tl.int64) * N + col // COLUMNS, rows < R
        tl.store(top_ptr + at, both, mask=mask)
        if MASSES:
            mass = mass * tl.exp2((top - both) * per_log2) + mass2 * tl.exp2((top2 - both) * per_log2)
            tl.store(mass_ptr + at, mass, mask=mask)


@triton.jit(do_not_specialize=["R"])
def _over_tiles_kernel(
    z_ptr, z_stride, tops_ptr, masses_ptr, top_ptr, lse_ptr, best_ptr, R, V, N, inverse_temperature, per_log2,
    MASSES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `largest` returns, from the sums of tiles; the largest logit's index is looked up in its tile."""
    rows, lanes = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = rows[:, None] * N + lanes[None, :], rows < R
    mask = inside[:, None] & (lanes < N)[None, :]
    tops = tl.load(tops_ptr + at, mask=mask, other=LOW)
    top = tl.max(tops, axis=1)
    tl.store(top_ptr + rows, top * inverse_temperature, mask=inside)
    if MASSES:
        masses = tl.load(masses_ptr + at, mask=mask, other=0.0) * tl.exp2((tops - top[:, None]) * per_log2)
        mass = tl.where(inside, tl.sum(masses, axis=1), 1.0)
        tl.store(lse_ptr + rows, top * inverse_temperature + tl.log(mass), mask=inside)
    tile = tl.min(tl.where(tops == top[:, None], lanes[None, :], N - 1), axis=1)
    cols = tile[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols, mask=inside[:, None] & (cols < V), other=LOW).to(tl.float32)
    best = tl.min(tl.where(z == top[:, None], cols, V - 1), axis=1)  # of a row of NaN or -inf: one that can be read
    tl.store(best_ptr + rows, best.to(tl.int64), mask=inside)


def largest_product(
    x_RH: Tensor, weight_VH: Tensor, temperature: float, out_RV: Tensor, masses: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """out = x W^T; returns (largest value, log-sum-exp, index of the largest value) of out / temperature, each [R].

    Args:
        masses: without, the log-sum-exp is not computed, and what is returned for it is not defined.
    """
    (R, H), V, device = x_RH.shape, len(weight_VH), x_RH.device
    if H < MANY_INPUTS or not _suits(x_RH, weight_VH, out_RV):
        return largest(torch.mm(x_RH, weight_VH.t(), out=out_RV), temperature)
    N, inverse = triton.cdiv(V, COLUMNS), 1.0 / temperature
    top, lse = per_row(2, x_RH)
    tops = torch.empty(R, N, dtype=torch.float32, device=device)
    sums = torch.empty_like(tops) if masses else tops
    best = torch.empty(R, dtype=torch.int64, device=device)
    programs = _programs(device)
    _largest_kernel[(programs,)](
        _in_tiles(x_RH, [ROWS, INPUTS]), _in_tiles(weight_VH, [COLUMNS, INPUTS]),
        _in_tiles(out_RV, [ROWS, COLUMNS // 2]), tops, sums, R, V, H, inverse * LOG2_E, programs, masses,
        V % COLUMNS > 0, **_TILES, num_warps=8, num_stages=3,
    )  # fmt: skip
    block = triton.next_power_of_2(N)
    rows = max(1, min(64, 2048 // block))  # their logits of a tile fit the registers
    _over_tiles_kernel[(triton.cdiv(R, rows),)](
        out_RV, out_RV.stride(0), tops, sums, top, lse, best, R, V, N, inverse, inverse * LOG2_E, masses,
        COLUMNS, rows, block, num_warps=4,
    )  # fmt: skip
    return top, lse, best
