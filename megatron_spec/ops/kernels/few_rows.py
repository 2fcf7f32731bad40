"""Products of few rows, of decoding: a norm before, and a gate, bias or residual sum after, are part of the product.

Such a product takes as long as its weights take to read, if enough of them are on their way at any time: about 3 MB on
an H200. So there are many programs of few outputs each, every program loads several blocks ahead, and where the outputs
are few, several programs share each: they take a part of the inputs each, and the last one to finish sums up, in the
order of the parts.

A row is the same to the last bit whether it is computed alone or among others: one binary serves 1 to `FEW_ROWS` rows,
and how a product is divided depends on the weights' shape alone (`tiles_of`).

R rows, H inputs and O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.decode import COUNTERS, EARLY, allow_next, counters, wait_for_previous

FEW_ROWS = 16
"""Most rows of `few_rows_product`: those of one tensor core instruction."""
PROGRAMS = 264
"""Programs that a product should have: two for each of an H200's processors. A constant, so that every device sums in
the same order."""
SHARE = 512
"""Fewest inputs of a program where several share an output."""


WIDE = 16384
"""Outputs of which programs are many, however large: those of a head."""


class Tiles(NamedTuple):
    """How a product is divided.

    Attributes:
        columns: outputs of a program, 16 or a multiple: a power of two.
        block: inputs that a program takes at a time.
        parts: programs that share an output.
        warps: of a program.
        stages: blocks that a program has in shared memory.
        early: start while the kernel before runs, and ask for weights (`decode.EARLY`).
    """

    columns: int = 16
    block: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 6
    early: bool = False


def tiles_of(outputs: int, inputs: int, gated: bool = False, divided: bool = True) -> Tiles:
    """The division of a product of one row to `FEW_ROWS`.

    Args:
        outputs: O.
        inputs: H, of both inputs together if there are two.
        gated: two weights of O outputs each.
        divided: several programs may share an output.
    """
    if outputs >= WIDE:
        return Tiles(columns=32, block=128, stages=4, early=EARLY)
    parts = min(triton.cdiv(PROGRAMS, triton.cdiv(outputs, 16)), inputs // SHARE) if divided else 1
    block = 256 if inputs // max(parts, 1) >= 1024 else 128
    return Tiles(block=block, parts=max(parts, 1), stages=4 if gated or block == 256 else 6, early=EARLY)


@triton.jit
def _prefetch(w_at, begin, end, LINES: tl.constexpr):
    """Ask for the first weights of rows that begin at `w_at` [COLS, 1], up to LINES of 128 bytes of each."""
    line: tl.constexpr = 1024 // w_at.dtype.element_ty.primitive_bitwidth
    at = w_at + tl.minimum(begin + tl.arange(0, LINES) * line, end - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _inner_products(
    x_ptr, norm_ptr, w_at, up_at, live, used, begin, end, H,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(x times rows of w, x times rows of up, squares of x) over the inputs from `begin` to `end`.

    fp32 [ROWS, COLS] twice, and [ROWS]. With NORM, x is multiplied by the norm's weight; the factor of the row follows
    from the squares. w_at, up_at: [COLS, 1], first columns of the rows.
    """
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc_up = tl.zeros((ROWS, COLS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)  # summed up once, at the end: that needs all threads
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
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            weight = tl.load(norm_ptr + h, mask=h < end, other=0.0).to(tl.float32)
            x = (wide * weight[None, :]).to(x.dtype)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_at + h[None, :], mask=w_mask, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision=PRECISION)
    return acc, acc_up, tl.sum(squares, axis=1)


@triton.jit
def _scaled(acc, squares, H, eps, NORM: tl.constexpr):
    """A product, times the factor of its rows' norms."""
    if NORM:
        acc *= (1.0 / tl.sqrt(squares / H + eps))[:, None]
    return acc


@triton.jit
def _store_part(
    part_ptr, mine, acc, acc_up, squares, ROWS: tl.constexpr, COLS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """What a part adds to its outputs. `mine`: number of the part, of all parts of all programs."""
    r = tl.arange(0, ROWS)
    at = r[:, None] * COLS + tl.arange(0, COLS)[None, :]
    size: tl.constexpr = ROWS * (COLS * (1 + GATED) + NORM)
    tl.store(part_ptr + mine * size + at, acc)
    if GATED:
        tl.store(part_ptr + mine * size + ROWS * COLS + at, acc_up)
    if NORM:
        tl.store(part_ptr + mine * size + ROWS * COLS * (1 + GATED) + r, squares)


@triton.jit
def _sum_of_parts(
    part_ptr, place, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """`_inner_products` over all inputs, from the parts, which other programs have written."""
    r = tl.arange(0, ROWS)
    at = r[:, None] * COLS + tl.arange(0, COLS)[None, :]
    size: tl.constexpr = ROWS * (COLS * (1 + GATED) + NORM)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc_up = tl.zeros((ROWS, COLS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(PARTS):
        here = part_ptr + (place * PARTS + i) * size
        acc += tl.load(here + at, cache_modifier=".cg")
        if GATED:
            acc_up += tl.load(here + ROWS * COLS + at, cache_modifier=".cg")
        if NORM:
            squares += tl.load(here + ROWS * COLS * (1 + GATED) + r, cache_modifier=".cg")
    return acc, acc_up, squares


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
    x_ptr, norm_ptr, x2_ptr, norm2_ptr, w_ptr, w2_ptr, w3_ptr, bias_ptr, bias2_ptr, bias3_ptr, rest_ptr, out_ptr,
    part_ptr, count_ptr, R, H, H2, first, second, outputs, length, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, NORM2: tl.constexpr, WEIGHTS: tl.constexpr, SECOND: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
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
    w_at = w_ptr + own[:, None].to(tl.int64) * (H + H2)
    up_at = w2_ptr + own[:, None].to(tl.int64) * (H + H2)
    start, stop = part * length, tl.minimum((part + 1) * length, H)
    if EARLY:  # nothing but weights may be read, and nothing written, before the wait
        allow_next()
        there = tl.where(used, own, 0)[:, None].to(tl.int64) * (H + H2)
        _prefetch(w_ptr + there, start, stop, 16)
        if GATED:
            _prefetch(w2_ptr + there, start, stop, 16)
        wait_for_previous()
    acc, acc_up, squares = _inner_products(
        x_ptr, norm_ptr, w_at, up_at, live, used, start, stop, H, ROWS, COLS, BLOCK, EVEN, NORM, GATED, PRECISION
    )
    last = True
    if PARTS > 1:
        _store_part(part_ptr, place * PARTS + part, acc, acc_up, squares, ROWS, COLS, NORM, GATED)
        tl.debug_barrier()  # all of the program's values are out before it is counted
        last = tl.atomic_add(count_ptr + place, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(count_ptr + place, 0)
            acc, acc_up, squares = _sum_of_parts(part_ptr, place, ROWS, COLS, PARTS, NORM, GATED)
        acc = _scaled(acc, squares, H, eps, NORM)
        acc_up = _scaled(acc_up, squares, H, eps, NORM)
        if SECOND:
            more, _, squares = _inner_products(
                x2_ptr, norm2_ptr, w_at + H, up_at, live, used, 0, H2, H2, ROWS, COLS, BLOCK, EVEN, NORM2, False,
                PRECISION,
            )  # fmt: skip
            acc += _scaled(more, squares, H2, eps, NORM2)
        _store_outputs(
            acc, acc_up, bias_ptr, bias2_ptr, rest_ptr, out_ptr, own, cols, live, used, outputs, ROWS, GATED, HAS_BIAS,
            HAS_REST,
        )  # fmt: skip


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
        norm_H: weight of the RMS norm (`eps`) of x.
        gated: the result is silu(gate) * up, [R, O of each].
        rest_RO: residual stream; not with `gated`.
        second: another input [R, H2] for the weights' further columns, and the weight of its norm; not with `gated`.
        tiles: how the product is divided (with `second` into one part); default: `tiles_of` its shape.
    """
    (R, H), sizes = x_RH.shape, [len(w) for w in weights]
    outputs = sizes[0] if gated else sum(sizes)
    x2, norm2 = second or (x_RH, None)
    H2 = x2.shape[1] if second is not None else 0
    columns, block, parts, warps, stages, early = tiles or tiles_of(outputs, H + H2, gated, second is None)
    places = triton.cdiv(outputs, columns)
    assert R <= FEW_ROWS and x_RH.is_contiguous() and all(w.is_contiguous() for w in weights), (x_RH.shape, sizes)
    assert gated or not any(size % columns for size in sizes[:-1]), (sizes, columns)
    assert parts == 1 or (second is None and places <= COUNTERS), (parts, places)
    out = x_RH.new_empty(R, outputs)
    size = FEW_ROWS * (columns * (1 + gated) + (norm_H is not None))
    scratch = x_RH.new_empty(places * parts * size if parts > 1 else 0, dtype=torch.float32)
    length, missing = block * triton.cdiv(triton.cdiv(H, block), parts), (x_RH,) * 3
    ends = [sum(sizes[: i + 1]) if i + 1 < len(sizes) else outputs for i in range(2)]
    _product_kernel[(places, parts)](
        x_RH, x_RH if norm_H is None else norm_H, x2, x2 if norm2 is None else norm2, *(*weights, *missing)[:3],
        *(*(biases or ()), *missing)[:3], x_RH if rest_RO is None else rest_RO, out, scratch, counters(x_RH.device),
        R, H, H2, *ends, outputs, length, eps, FEW_ROWS, columns, block, parts, H % block == 0 and H2 % block == 0,
        norm_H is not None, norm2 is not None, 1 if gated else len(weights), second is not None, gated,
        biases is not None, rest_RO is not None, early, "ieee" if x_RH.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
