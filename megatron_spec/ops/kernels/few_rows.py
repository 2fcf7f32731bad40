"""Products of few rows, of decoding: a gate, bias or residual sum after a product is part of it.

Such a product takes as long as its weights take to read, if enough of them are on their way at any time: about 3 MB on
an H200. So there are many programs of few outputs each, every program loads several blocks ahead, and where the outputs
are few, several programs share each: they take a part of the inputs each, and the last one to finish sums up, in the
order of the parts. A norm before a product is a small kernel of its own: programs that normalise what they read wait
for arithmetic instead of weights, two to three times as long where weights are large.

A row is the same to the last bit whether it is computed alone or among others: one binary serves 1 to `FEW_ROWS` rows,
and how a product is divided depends on the weights' shape and type alone (`tiles_of`).

R rows, H inputs and O outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.decode import COUNTERS, counters
from megatron_spec.ops.kernels.rows import block_of
from megatron_spec.ops.tiles import FEW_ROWS, Tiles, tiles_of


@triton.jit
def _normed_row(x_ptr, norm_ptr, out_ptr, H, eps, BLOCK: tl.constexpr, NORM: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < H, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)
        weight = tl.load(norm_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        x = (wide * rstd * weight).to(x.dtype)
    tl.store(out_ptr + cols, x, mask=cols < H)


@triton.jit
def _norm_kernel(
    x_ptr, norm_ptr, x2_ptr, norm2_ptr, out_ptr, H, H2, eps, BLOCK: tl.constexpr, BLOCK2: tl.constexpr,
    NORM: tl.constexpr, NORM2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.program_id(1) == 0:
        _normed_row(x_ptr + row * H, norm_ptr, out_ptr + row * (H + H2), H, eps, BLOCK, NORM)
    else:
        _normed_row(x2_ptr + row * H2, norm2_ptr, out_ptr + row * (H + H2) + H, H2, eps, BLOCK2, NORM2)


@triton.jit
def _inner_products(
    x_ptr, w_at, up_at, live, used, begin, end, H, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, COLS] (x times rows of w, x times rows of up) over the inputs from `begin` to `end`.

    w_at, up_at: [COLS, 1], first columns of the rows.
    """
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc_up = tl.zeros((ROWS, COLS), tl.float32)
    x_at = x_ptr + tl.arange(0, ROWS)[:, None] * H
    for at in range(begin, end, BLOCK):
        h = at + tl.arange(0, BLOCK)
        x_mask = live
        w_mask = used[:, None]
        if not EVEN:
            x_mask = live & (h < end)[None, :]
            w_mask = used[:, None] & (h < end)[None, :]
        x = tl.load(x_at + h[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_at + h[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_at + h[None, :], mask=w_mask, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit
def _store_part(part_ptr, mine, acc, acc_up, ROWS: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr):
    """What a part adds to its outputs. `mine`: number of the part, of all parts of all programs."""
    at = (
        part_ptr + mine * (ROWS * COLS * (1 + GATED)) + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    )
    tl.store(at, acc)
    if GATED:
        tl.store(at + ROWS * COLS, acc_up)


@triton.jit
def _sum_of_parts(
    part_ptr, place, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """`_inner_products` over all inputs, from the parts, which other programs have written."""
    at = part_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc_up = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.static_range(PARTS):
        here = at + (place * PARTS + i) * (ROWS * COLS * (1 + GATED))
        acc += tl.load(here, cache_modifier=".cg")
        if GATED:
            acc_up += tl.load(here + ROWS * COLS, cache_modifier=".cg")
    return acc, acc_up


@triton.jit
def _store_outputs(
    acc, acc_up, bias_ptr, bias2_ptr, rest_ptr, out_ptr, own, cols, live, used, outputs,
    ROWS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Bias, gate and residual sum of finished products."""
    rows = tl.arange(0, ROWS)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + own, mask=used, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias2_ptr + own, mask=used, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    if GATED:  # rounded where the plain code rounds
        gate = acc.to(dtype).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * acc_up.to(dtype).to(tl.float32)
    mask = live & used[None, :]
    if HAS_REST:
        rest = tl.load(rest_ptr + rows * outputs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = acc.to(dtype).to(tl.float32) + rest
    tl.store(out_ptr + rows * outputs + cols[None, :], acc.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["R"])  # the others: what they are multiples of, so that loads are wide
def _product_kernel(
    x_ptr, w_ptr, w2_ptr, w3_ptr, bias_ptr, bias2_ptr, bias3_ptr, rest_ptr, out_ptr, part_ptr, count_ptr, R, H, first,
    second, outputs, length,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    WEIGHTS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    begin = place * COLS
    end = outputs
    before = begin * 0
    if WEIGHTS > 1:  # side by side: columns from `first` and `second` on are those of the next weight
        w_ptr = tl.where(begin >= second, w3_ptr, tl.where(begin >= first, w2_ptr, w_ptr))
        bias_ptr = tl.where(begin >= second, bias3_ptr, tl.where(begin >= first, bias2_ptr, bias_ptr))
        end = tl.where(begin >= second, outputs, tl.where(begin >= first, second, first))
        before = tl.where(begin >= second, second, tl.where(begin >= first, first, 0))
    cols = begin + tl.arange(0, COLS)
    own = cols - before
    live = tl.arange(0, ROWS)[:, None] < R
    used = cols < end
    w_at = w_ptr + own[:, None].to(tl.int64) * H
    up_at = w2_ptr + own[:, None].to(tl.int64) * H
    start, stop = part * length, tl.minimum((part + 1) * length, H)
    acc, acc_up = _inner_products(
        x_ptr, w_at, up_at, live, used, start, stop, H, ROWS, COLS, BLOCK, EVEN, GATED, PRECISION
    )
    last = True
    if PARTS > 1:
        _store_part(part_ptr, place * PARTS + part, acc, acc_up, ROWS, COLS, GATED)
        tl.debug_barrier()  # all of the program's values are out before it is counted
        last = tl.atomic_add(count_ptr + place, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(count_ptr + place, 0)
            acc, acc_up = _sum_of_parts(part_ptr, place, ROWS, COLS, PARTS, GATED)
        _store_outputs(
            acc, acc_up, bias_ptr, bias2_ptr, rest_ptr, out_ptr, own, cols, live, used, outputs, ROWS, GATED, HAS_BIAS,
            HAS_REST,
        )  # fmt: skip


def normed_rows(
    x_RH: Tensor, norm_H: Tensor | None, eps: float, second: tuple[Tensor, Tensor | None] | None = None
) -> Tensor:
    """[R, H] RMS norm of x, rounded once; with `second` (another input [R, H2], its norm) [R, H + H2], side by side.
    An input whose norm is None is copied."""
    (R, H), (x2, norm2) = x_RH.shape, second or (x_RH, None)
    H2 = 0 if second is None else x2.shape[1]
    assert x_RH.is_contiguous() and x2.is_contiguous(), (x_RH.stride(), x2.stride())
    out = x_RH.new_empty(R, H + H2)
    _norm_kernel[(R, 1 if second is None else 2)](
        x_RH, x_RH if norm_H is None else norm_H, x2, x2 if norm2 is None else norm2, out, H, H2, eps, block_of(H),
        block_of(max(H2, 1)), norm_H is not None, norm2 is not None,
        num_warps=8 if max(H, H2) > 1024 else 4,
    )  # fmt: skip
    return out


def few_rows_product(
    x_RH: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    rest_RO: Tensor | None = None,
    second: tuple[Tensor, Tensor | None] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """[R, O] = rest + norm(x) W^T + bias, for up to three weights side by side and R <= `FEW_ROWS`.

    Args:
        weights: each [its share of O, H], the first ones multiples of 16; (gate, up) with `gated`.
        norm_H: weight of the RMS norm (`eps`) of x: a kernel before the product (`normed_rows`).
        gated: the result is silu(gate) * up, [R, O of each].
        rest_RO: residual stream; not with `gated`.
        second: another input [R, H2] for the weights' further columns, and the weight of its norm.
        tiles: how the product is divided; default: `tiles_of` its shape.
    """
    assert len(x_RH) <= FEW_ROWS, x_RH.shape
    if norm_H is not None or second is not None:
        x_RH = normed_rows(x_RH, norm_H, eps, second)
    (R, H), sizes = x_RH.shape, [len(w) for w in weights]
    assert x_RH.is_contiguous() and all(w.is_contiguous() and w.shape[1] == H for w in weights), (H, sizes)
    outputs = sizes[0] if gated else sum(sizes)
    unit = 0 if gated else math.gcd(0, *sizes[:-1])
    columns, block, parts, warps, stages = tiles or tiles_of(outputs, H, gated, x_RH.element_size(), unit)
    places = triton.cdiv(outputs, columns)
    assert not unit % columns, (sizes, columns)
    assert parts == 1 or places <= COUNTERS, (parts, places)
    out = x_RH.new_empty(R, outputs)
    size = FEW_ROWS * columns * (1 + gated)
    scratch = x_RH.new_empty(places * parts * size if parts > 1 else 0, dtype=torch.float32)
    length, missing = block * triton.cdiv(triton.cdiv(H, block), parts), (x_RH,) * 3
    ends = [sum(sizes[: i + 1]) if i + 1 < len(sizes) else outputs for i in range(2)]
    _product_kernel[(places, parts)](
        x_RH, *(*weights, *missing)[:3], *(*(biases or ()), *missing)[:3], x_RH if rest_RO is None else rest_RO, out,
        scratch, counters(x_RH.device), R, H, *ends, outputs, length, FEW_ROWS, columns, block, parts, H % block == 0,
        1 if gated else len(weights), gated, biases is not None, rest_RO is not None,
        "ieee" if x_RH.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
