"""Single-pass Triton kernels over rows: norms, gated activation, shifted sums.

All of them are memory-bound, so each reads its inputs once and writes its outputs once. Plain versions of the same
arithmetic are in the drafts (`drafts/layer.py`); tests compare them. Any width works:
blocks are padded to powers of two, as Triton requires. Kernels do not recompile for another number of rows.

Rows are flattened [S * B] (row = s * B + b). R rows, H hidden, M intermediate, T draft steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE_WARPS = 8
PARTIALS = 264
"""Programs of a norm's backward; each accumulates the weight gradient of its rows before writing it."""


def block_of(width: int) -> int:
    """Lanes of a block that holds a row of `width` values."""
    return int(triton.next_power_of_2(width))


@triton.jit
def _norm_kernel(
    a_ptr, b_ptr, sum_ptr, w1_ptr, out1_ptr, w2_ptr, out2_ptr, place_ptr, rstd_ptr, H, eps,
    HAS_B: tl.constexpr, HAS_1: tl.constexpr, HAS_2: tl.constexpr, HAS_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    x = tl.load(a_ptr + row * H + cols, mask=mask, other=0.0)
    if HAS_B:
        b = tl.load(b_ptr + row * H + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + b.to(tl.float32)).to(x.dtype)  # rounded like the plain sum
        tl.store(sum_ptr + row * H + cols, x, mask=mask)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    normed = wide * rstd
    if HAS_1:
        w = tl.load(w1_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out1_ptr + row * H + cols, (normed * w).to(x.dtype), mask=mask)
    if HAS_2:
        place = row
        if HAS_PLACE:
            place = tl.load(place_ptr + row).to(tl.int64)
        if place >= 0:
            w = tl.load(w2_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(out2_ptr + place * H + cols, (normed * w).to(x.dtype), mask=mask)


def norm_forward(
    a_RH: Tensor,
    eps: float,
    b_RH: Tensor | None = None,
    sum_RH: Tensor | None = None,
    first: tuple[Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
) -> Tensor:
    """RMS norm of a (+ b; the sum is written to `sum_RH`) with one or two weights at once.

    Args:
        first: (weight [H], output [R, H]).
        second: another weight and output, written at row `place_R[row]` (int32; -1: not written) when given.

    Returns:
        fp32 [R], reciprocal of the root mean square, needed by the backward.
    """
    R, H = a_RH.shape
    rstd = torch.empty(R, dtype=torch.float32, device=a_RH.device)
    w1, out1 = first or (a_RH, a_RH)
    w2, out2 = second or (a_RH, a_RH)
    _norm_kernel[(R,)](
        a_RH, a_RH if b_RH is None else b_RH, a_RH if sum_RH is None else sum_RH, w1, out1, w2, out2,
        a_RH if place_R is None else place_R, rstd, H, eps, b_RH is not None, first is not None, second is not None,
        place_R is not None, block_of(H), num_warps=WIDE_WARPS,
    )  # fmt: skip
    return rstd


@triton.jit(do_not_specialize=["R"])
def _norm_backward_kernel(
    x_ptr, rstd_ptr, dy1_ptr, w1_ptr, dw1_ptr, dy2_ptr, w2_ptr, dw2_ptr, place_ptr, add_ptr, dx_ptr, R, H,
    HAS_1: tl.constexpr, HAS_2: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_ADD: tl.constexpr, HAS_DX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    dw1 = tl.zeros((BLOCK,), tl.float32)
    dw2 = tl.zeros((BLOCK,), tl.float32)
    w1 = tl.zeros((BLOCK,), tl.float32)
    w2 = tl.zeros((BLOCK,), tl.float32)
    if HAS_1:
        w1 = tl.load(w1_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_2:
        w2 = tl.load(w2_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    for i in range(0, tl.cdiv(R - start, step)):
        row = start + i * step
        rstd = tl.load(rstd_ptr + row)
        normed = tl.load(x_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        g = tl.zeros((BLOCK,), tl.float32)
        if HAS_1:
            dy = tl.load(dy1_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
            dw1 += dy * normed
            g += dy * w1
        if HAS_2:
            place = row
            if HAS_PLACE:
                place = tl.load(place_ptr + row).to(tl.int64)
            width = tl.where(place >= 0, H, 0)  # an absent row has no columns
            dy = tl.load(dy2_ptr + place * H + cols, mask=cols < width, other=0.0).to(tl.float32)
            dw2 += dy * normed
            g += dy * w2
        if HAS_DX:
            dx = rstd * (g - normed * (tl.sum(g * normed, axis=0) / H))
            if HAS_ADD:
                dx += tl.load(add_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_1:
        at = dw1_ptr + start * H + cols
        tl.store(at, tl.load(at, mask=mask, other=0.0) + dw1, mask=mask)
    if HAS_2:
        at = dw2_ptr + start * H + cols
        tl.store(at, tl.load(at, mask=mask, other=0.0) + dw2, mask=mask)


def norm_partials(H: int, device: torch.device) -> Tensor:
    """fp32 [programs, H] zeros: the weight gradient of a norm is their sum over the first axis."""
    return torch.zeros(PARTIALS, H, dtype=torch.float32, device=device)


def norm_backward(
    x_RH: Tensor,
    rstd_R: Tensor,
    dx_RH: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
    add_RH: Tensor | None = None,
) -> None:
    """Backward of `norm_forward`.

    Args:
        dx_RH: output, gradient of x (+ `add_RH`, which may be the same tensor); None: not computed.
        first: (gradient of the output [R, H], weight [H], partial sums from `norm_partials`, accumulated).
        second: the same for the second output, at row `place_R[row]`; absent rows count as zero.
    """
    R, H = x_RH.shape
    dy1, w1, dw1 = first or (x_RH, x_RH, x_RH)
    dy2, w2, dw2 = second or (x_RH, x_RH, x_RH)
    _norm_backward_kernel[(PARTIALS,)](
        x_RH, rstd_R, dy1, w1, dw1, dy2, w2, dw2, x_RH if place_R is None else place_R,
        x_RH if add_RH is None else add_RH, x_RH if dx_RH is None else dx_RH, R, H, first is not None,
        second is not None, place_R is not None, add_RH is not None, dx_RH is not None, block_of(H),
        num_warps=WIDE_WARPS,
    )  # fmt: skip


@triton.jit
def _gated_kernel(x_ptr, h_ptr, dh_ptr, M, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < M
    gate_at = x_ptr + row * 2 * M + cols
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + M, mask=mask, other=0.0).to(tl.float32)
    sig = 1.0 / (1.0 + tl.exp(-gate))
    act = gate * sig
    out = h_ptr.dtype.element_ty
    tl.store(h_ptr + row * M + cols, (act * up).to(out), mask=mask)
    if BACKWARD:
        dh = tl.load(dh_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(gate_at, (dh * up * (sig + act * (1.0 - sig))).to(out), mask=mask)
        tl.store(gate_at + M, (dh * act).to(out), mask=mask)


def gated_forward(x_RX: Tensor, h_RM: Tensor) -> None:
    """h = silu(gate) * up of x = [gate | up] [R, 2M]."""
    R, M = h_RM.shape
    block = min(2048, block_of(M))
    _gated_kernel[(R, triton.cdiv(M, block))](x_RX, h_RM, x_RX, M, False, block, num_warps=4)


def gated_backward(x_RX: Tensor, dh_RM: Tensor, h_RM: Tensor) -> None:
    """Recompute h and replace x by its own gradient, in place."""
    R, M = h_RM.shape
    block = min(2048, block_of(M))
    _gated_kernel[(R, triton.cdiv(M, block))](x_RX, h_RM, dh_RM, M, True, block, num_warps=4)


@triton.jit(do_not_specialize=["P", "R", "later"])
def _shifted_sum_kernel(
    x_ptr, first_ptr, place_ptr, out_ptr, P, R, later, W, B, steps,
    HAS_FIRST: tl.constexpr, HAS_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < W
    acc = tl.zeros((BLOCK,), tl.float32)
    first = row
    if HAS_FIRST:
        first = tl.load(first_ptr + row, mask=row < P, other=-1).to(tl.int64)
    if (row < P) & (first >= 0):
        acc += tl.load(x_ptr + first * W + cols, mask=mask, other=0.0).to(tl.float32)
    for k in range(1, steps):
        source = row - k * B
        inside = (source >= 0) & (source < P)
        if HAS_PLACE:
            source = tl.load(place_ptr + source, mask=inside, other=-1).to(tl.int64)
            inside = inside & (source >= 0)
        if inside:
            at = R + (k - 1) * later + source
            acc += tl.load(x_ptr + at * W + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * W + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)


def shifted_sum(
    x_NW: Tensor, R: int, later: int, steps: int, B: int, place_P: Tensor | None = None, first_P: Tensor | None = None
) -> Tensor:
    """[P + (T - 1) * B, W]: row e sums, over steps k, the row of step k at position e - k * B, if it exists.

    Args:
        x_NW: R rows of step 0, then `later` rows of each later step.
        place_P: int32, row of a later step for each of P positions, -1 for none; default: the identity.
        first_P: the same of step 0; P is R without it.
    """
    W, P = x_NW.shape[1], R if first_P is None else len(first_P)
    out = torch.empty(P + (steps - 1) * B, W, dtype=x_NW.dtype, device=x_NW.device)
    block = min(1024, block_of(W))
    _shifted_sum_kernel[(out.shape[0], triton.cdiv(W, block))](
        x_NW, x_NW if first_P is None else first_P, x_NW if place_P is None else place_P, out, P, R, later, W, B, steps,
        first_P is not None, place_P is not None, block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _scale_kernel(x_ptr, scale_ptr, count, BLOCK: tl.constexpr):
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0)
        tl.store(x_ptr + at, (x.to(tl.float32) * scale).to(x.dtype), mask=at < count)


def scale_(x: Tensor, scale: Tensor) -> Tensor:
    """x (contiguous) times a scalar on the device, in place; does not read x when the scalar is 1."""
    if x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), 8192),)](x, scale, x.numel(), 8192, num_warps=8)
    return x
