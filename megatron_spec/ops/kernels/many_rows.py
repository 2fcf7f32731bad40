"""Triton products of many rows that compute in a tile what would be another pass over memory: the gate, or each row's
largest logit and log-sum-exp.

Persistent programs, one per multiprocessor, with tiles read and written by Hopper's copy engine (tensor descriptors).
On an H200 the product itself is as fast as cuBLAS's (docs/performance.md).

R rows, H inputs, M intermediate, V columns of logits, N tiles of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.loss import largest
from megatron_spec.ops.kernels.rows import gated_forward

MANY = 1024
"""Rows from which on these products are faster than cuBLAS's and another pass."""
ROWS, COLUMNS, INPUTS = 128, 256, 64
"""Of a tile: its accumulators fill the registers of eight warps."""
GROUP = 16
"""Tiles of rows that are computed for one tile of columns after another, so that both stay in the L2 cache."""
LOW = tl.constexpr(-1.0e30)  # finite, so that columns outside the matrix add exp(-inf) = 0 instead of NaN


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


@triton.jit
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
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton 3.4, as the path requires

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
def _row_sums(z, col, V, inverse_temperature, WIDTH: tl.constexpr):
    """(largest, sum of exp(z - largest), column of the largest) of the rows of a part of a tile."""
    cols = col + tl.arange(0, WIDTH)
    z = tl.where((cols < V)[None, :], z * inverse_temperature, float("-inf"))
    top = tl.maximum(tl.max(z, axis=1), LOW)
    where = tl.min(tl.where(z == top[:, None], cols[None, :], 2147483647), axis=1)
    return top, tl.sum(tl.exp(z - top[:, None]), axis=1), where


@triton.jit
def _largest_kernel(
    x_at, weight_at, out_at, top_ptr, mass_ptr, where_ptr, R, V, H, inverse_temperature, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
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
        top, mass, where = _row_sums(left.to(tl.float32), col, V, inverse_temperature, HALF)
        top2, mass2, where2 = _row_sums(right.to(tl.float32), col + HALF, V, inverse_temperature, HALF)
        both = tl.maximum(top, top2)
        rows = row + tl.arange(0, ROWS)
        at, mask = rows.to(tl.int64) * N + col // COLUMNS, rows < R
        tl.store(top_ptr + at, both, mask=mask)
        tl.store(mass_ptr + at, mass * tl.exp(top - both) + mass2 * tl.exp(top2 - both), mask=mask)
        tl.store(where_ptr + at, tl.where(top >= top2, where, where2), mask=mask)


@triton.jit
def _over_tiles_kernel(
    tops_ptr, masses_ptr, wheres_ptr, top_ptr, lse_ptr, best_ptr, R, V, N, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows, lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = rows.to(tl.int64)[:, None] * N + lanes[None, :]
    mask = (rows < R)[:, None] & (lanes < N)[None, :]
    tops = tl.load(tops_ptr + at, mask=mask, other=LOW)
    top = tl.max(tops, axis=1)
    mass = tl.load(masses_ptr + at, mask=mask, other=0.0) * tl.exp(tops - top[:, None])
    wheres = tl.load(wheres_ptr + at, mask=mask, other=2147483647)
    best = tl.min(tl.where(tops == top[:, None], wheres, 2147483647), axis=1)
    tl.store(top_ptr + rows, top, mask=rows < R)
    total = tl.where(rows < R, tl.sum(mass, axis=1), 1.0)
    tl.store(lse_ptr + rows, top + tl.log(total), mask=rows < R)
    tl.store(best_ptr + rows, tl.minimum(best, V - 1).to(tl.int64), mask=rows < R)  # a row of NaN has none


def largest_product(
    x_RH: Tensor, weight_VH: Tensor, temperature: float, out_RV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out = x W^T; returns (largest value, log-sum-exp, index of the largest value) of out / temperature, each [R]."""
    if not _suits(x_RH, weight_VH, out_RV):
        return largest(torch.mm(x_RH, weight_VH.t(), out=out_RV), temperature)
    (R, H), V = x_RH.shape, len(weight_VH)
    N, device = triton.cdiv(V, COLUMNS), x_RH.device
    top, lse = torch.empty(2, R, dtype=torch.float32, device=device)
    best = torch.empty(R, dtype=torch.int64, device=device)
    tops, masses = torch.empty(2, R, N, dtype=torch.float32, device=device)
    wheres = torch.empty(R, N, dtype=torch.int32, device=device)
    programs = _programs(device)
    _largest_kernel[(programs,)](
        _in_tiles(x_RH, [ROWS, INPUTS]),
        _in_tiles(weight_VH, [COLUMNS, INPUTS]),
        _in_tiles(out_RV, [ROWS, COLUMNS // 2]),
        tops, masses, wheres, R, V, H, 1.0 / temperature, programs, **_TILES, num_warps=8, num_stages=3,
    )  # fmt: skip
    block = triton.next_power_of_2(N)
    rows = max(1, 2048 // block)
    _over_tiles_kernel[(triton.cdiv(R, rows),)](tops, masses, wheres, top, lse, best, R, V, N, rows, block, num_warps=4)
    return top, lse, best
