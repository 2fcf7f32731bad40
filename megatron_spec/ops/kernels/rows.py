"""Single-pass Triton kernels over rows: norms, rotary embedding, gated activation, shifted sums.

All of them are memory-bound, so each reads its inputs once and writes its outputs once. Plain versions of the same
arithmetic are in the drafts (`drafts/layer.py`); tests compare them. Any number of heads and head size works: blocks
are padded to powers of two, as Triton requires. Branch attention is in `branch.py`. Kernels do not recompile for
another number of rows.

Rows are flattened [S * B] (row = s * B + b). R rows, H hidden, M intermediate, N query heads, G key/value heads,
D head size, T draft steps, E = R + (T - 1) * B rows that carry an embedding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE_WARPS = 8
PARTIALS = 264
"""Programs of a norm's backward; each accumulates the weight gradient of its rows before writing it."""


def _block(width: int) -> int:
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
        place_R is not None, _block(H), num_warps=WIDE_WARPS,
    )  # fmt: skip
    return rstd


@triton.jit
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
        second is not None, place_R is not None, add_RH is not None, dx_RH is not None, _block(H),
        num_warps=WIDE_WARPS,
    )  # fmt: skip


@triton.jit
def _head_weight(q_at, k_at, mask, is_q, is_k):  # type: ignore[no-untyped-def]
    """Norm weights at queries and keys, 1 elsewhere."""
    q = tl.load(q_at, mask=mask, other=1.0).to(tl.float32)
    k = tl.load(k_at, mask=mask, other=1.0).to(tl.float32)
    return tl.where(is_q, q, tl.where(is_k, k, 1.0))


@triton.jit
def _heads_of(slot, used, N: tl.constexpr, G: tl.constexpr, GROUPED: tl.constexpr):
    """Kind of a head of the projection (query, key or value), and its index within the kind."""
    n: tl.constexpr = N // G
    if GROUPED:  # megatron-core: per key/value head its n query heads, then k, then v
        kv_head = slot // (n + 2)
        inside = slot % (n + 2)
        is_q = used & (inside < n)
        is_k = used & (inside == n)
        is_v = used & (inside == n + 1)
        q_head = kv_head * n + inside
    else:
        is_q = used & (slot < N)
        is_k = used & (slot >= N) & (slot < N + G)
        is_v = used & (slot >= N + G)
        q_head = slot
        kv_head = (slot - N) % G
    return is_q, is_k, is_v, q_head, kv_head


@triton.jit
def _of_heads(q_at, k_at, v_at, is_q, is_k, is_v):
    """Values of queries, keys and values in the order of the projection's heads."""
    q = tl.load(q_at, mask=is_q, other=0.0).to(tl.float32)
    k = tl.load(k_at, mask=is_k, other=0.0).to(tl.float32)
    return q + k + tl.load(v_at, mask=is_v, other=0.0).to(tl.float32)


@triton.jit
def _rotary_kernel(
    x_ptr, e_ptr, place_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, eps,
    N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
    GROUPED: tl.constexpr, HAS_E: tl.constexpr, HAS_PLACE: tl.constexpr, BACKWARD: tl.constexpr, STORE_V: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """x [R, (N + 2G) * D] <-> q [R, N*D], k [R, G*D], v [R, G*D]; BACKWARD rotates back and writes x."""
    row = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = 2 * HALF
    slot = tl.arange(0, SLOTS)[:, None]
    d = tl.arange(0, LANES)[None, :]
    used = (slot < N + 2 * G) & (d < HALF)
    is_q, is_k, is_v, q_head, kv_head = _heads_of(slot, used, N, G, GROUPED)
    cos = tl.load(cos_ptr + row * HALF + d, mask=d < HALF, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + d, mask=d < HALF, other=0.0)
    turns = is_q | is_k
    cos = tl.where(turns, cos, 1.0)
    sin = tl.where(turns, sin, 0.0)
    x_at = row * (N + 2 * G) * D + slot * D + d
    q_at = q_ptr + row * N * D + q_head * D + d
    k_at = k_ptr + row * G * D + kv_head * D + d
    v_at = v_ptr + row * G * D + kv_head * D + d
    if BACKWARD:
        a = _of_heads(q_at, k_at, v_at, is_q, is_k, is_v)
        b = _of_heads(q_at + HALF, k_at + HALF, v_at + HALF, is_q, is_k, is_v)
        out = x_ptr.dtype.element_ty
        tl.store(x_ptr + x_at, (a * cos + b * sin).to(out), mask=used)
        tl.store(x_ptr + x_at + HALF, (b * cos - a * sin).to(out), mask=used)
    else:
        a = tl.load(x_ptr + x_at, mask=used, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + x_at + HALF, mask=used, other=0.0).to(tl.float32)
        if HAS_E:
            e_at = x_at
            if HAS_PLACE:
                e_at += (tl.load(place_ptr + row).to(tl.int64) - row) * (N + 2 * G) * D
            a += tl.load(e_ptr + e_at, mask=used, other=0.0).to(tl.float32)
            b += tl.load(e_ptr + e_at + HALF, mask=used, other=0.0).to(tl.float32)
        if NORM:
            rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / D + eps)[:, None]
            scale = tl.where(turns, rstd, 1.0)
            a *= scale * _head_weight(q_norm_ptr + d, k_norm_ptr + d, d < HALF, is_q, is_k)
            b *= scale * _head_weight(q_norm_ptr + HALF + d, k_norm_ptr + HALF + d, d < HALF, is_q, is_k)
        out = q_ptr.dtype.element_ty
        left = (a * cos - b * sin).to(out)
        right = (b * cos + a * sin).to(out)
        tl.store(q_at, left, mask=is_q)
        tl.store(q_at + HALF, right, mask=is_q)
        tl.store(k_at, left, mask=is_k)
        tl.store(k_at + HALF, right, mask=is_k)
        if STORE_V:
            tl.store(v_at, left, mask=is_v)
            tl.store(v_at + HALF, right, mask=is_v)


def _launch_rotary(
    x: Tensor,
    e: Tensor | None,
    place: Tensor | None,
    tables: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    heads: int,
    kv_heads: int,
    grouped: bool,
    backward: bool,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    half = tables[0].shape[-1]
    _rotary_kernel[(q.shape[0],)](
        x, x if e is None else e, x if place is None else place, *tables, q, k, x if v is None else v,
        *(norms or (x, x)), eps, heads, kv_heads, half, _block(heads + 2 * kv_heads), _block(half), grouped,
        e is not None, place is not None, backward, v is not None, norms is not None, num_warps=4,
    )  # fmt: skip


def rotary_forward(
    x_RX: Tensor,
    tables: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    heads: int,
    kv_heads: int,
    e_EX: Tensor | None = None,
    place_R: Tensor | None = None,
    grouped: bool = False,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Split a fused projection into q, k (both rotated) and v.

    Args:
        x_RX: [R, (N + 2G) * D] projection; `e_EX`, contiguous rows of the same width, is added to it when given:
            row `place_R[row]` of it (default: the same row).
        tables: fp32 (cos, sin) [R, D / 2] of the rows' positions.
        q, k, v: outputs [R, N*D], [R, G*D], [R, G*D]; v may be None when only the rotation is needed.
        grouped: columns are ordered as in megatron-core's linear_qkv (per group: q..., k, v), else q, k, v.
        norms: weights [D] of the RMS norms (`eps`) over query and key heads, applied before rotation.
    """
    _launch_rotary(x_RX, e_EX, place_R, tables, q, k, v, heads, kv_heads, grouped, False, norms, eps)


@triton.jit
def _head_norm_backward_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, before_ptr, q_norm_ptr, k_norm_ptr, x_ptr, partial_ptr, R, eps,
    N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    D: tl.constexpr = 2 * HALF
    slot = tl.arange(0, SLOTS)[:, None]
    lanes = tl.arange(0, LANES)
    d = lanes[None, :]
    used = (slot < N + 2 * G) & (d < HALF)
    is_q, is_k, is_v, q_head, kv_head = _heads_of(slot, used, N, G, False)
    turns = is_q | is_k
    left_weight = _head_weight(q_norm_ptr + d, k_norm_ptr + d, d < HALF, is_q, is_k)
    right_weight = _head_weight(q_norm_ptr + HALF + d, k_norm_ptr + HALF + d, d < HALF, is_q, is_k)
    left_q = tl.zeros((LANES,), tl.float32)
    right_q = tl.zeros((LANES,), tl.float32)
    left_k = tl.zeros((LANES,), tl.float32)
    right_k = tl.zeros((LANES,), tl.float32)
    for i in range(0, tl.cdiv(R - start, step)):
        row = start + i * step
        cos = tl.where(turns, tl.load(cos_ptr + row * HALF + d, mask=d < HALF, other=1.0), 1.0)
        sin = tl.where(turns, tl.load(sin_ptr + row * HALF + d, mask=d < HALF, other=0.0), 0.0)
        q_at = q_ptr + row * N * D + q_head * D + d
        k_at = k_ptr + row * G * D + kv_head * D + d
        v_at = v_ptr + row * G * D + kv_head * D + d
        a = _of_heads(q_at, k_at, v_at, is_q, is_k, is_v)
        b = _of_heads(q_at + HALF, k_at + HALF, v_at + HALF, is_q, is_k, is_v)
        left = a * cos + b * sin
        right = b * cos - a * sin
        x_at = row * (N + 2 * G) * D + slot * D + d
        left_x = tl.load(before_ptr + x_at, mask=turns, other=0.0).to(tl.float32)
        right_x = tl.load(before_ptr + x_at + HALF, mask=turns, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(left_x * left_x + right_x * right_x, axis=1) / D + eps)[:, None]
        left_x *= rstd
        right_x *= rstd
        left_q += tl.sum(tl.where(is_q, left * left_x, 0.0), axis=0)
        right_q += tl.sum(tl.where(is_q, right * right_x, 0.0), axis=0)
        left_k += tl.sum(tl.where(is_k, left * left_x, 0.0), axis=0)
        right_k += tl.sum(tl.where(is_k, right * right_x, 0.0), axis=0)
        left *= left_weight
        right *= right_weight
        along = (tl.sum(left * left_x + right * right_x, axis=1) / D)[:, None]
        scale = tl.where(turns, rstd, 1.0)  # at values, x is 0 and the weight 1
        out = x_ptr.dtype.element_ty
        tl.store(x_ptr + x_at, (scale * (left - left_x * along)).to(out), mask=used)
        tl.store(x_ptr + x_at + HALF, (scale * (right - right_x * along)).to(out), mask=used)
    at = partial_ptr + start * 2 * D + lanes
    inside = lanes < HALF
    tl.store(at, tl.load(at, mask=inside, other=0.0) + left_q, mask=inside)
    tl.store(at + HALF, tl.load(at + HALF, mask=inside, other=0.0) + right_q, mask=inside)
    tl.store(at + D, tl.load(at + D, mask=inside, other=0.0) + left_k, mask=inside)
    tl.store(at + D + HALF, tl.load(at + D + HALF, mask=inside, other=0.0) + right_k, mask=inside)


def rotary_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, Tensor],
    x_RX: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, tuple[Tensor, Tensor], Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Gradients of q, k, v (k and v may be fp32) -> gradient of the fused projection, written to x.

    Args:
        norms: of a forward with norms: (the projection, their weights [D], `norm_partials` of 2D columns, to which the
            gradients of the weights of queries and keys are added).
    """
    if norms is None:
        _launch_rotary(x_RX, None, None, tables, q, k, v, heads, kv_heads, False, True)
        return
    half, (before_RX, weights, partial) = tables[0].shape[-1], norms
    _head_norm_backward_kernel[(PARTIALS,)](
        q, k, v, *tables, before_RX, *weights, x_RX, partial, len(x_RX), eps, heads, kv_heads, half,
        _block(heads + 2 * kv_heads), _block(half), num_warps=WIDE_WARPS,
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
    block = min(2048, _block(M))
    _gated_kernel[(R, triton.cdiv(M, block))](x_RX, h_RM, x_RX, M, False, block, num_warps=4)


def gated_backward(x_RX: Tensor, dh_RM: Tensor, h_RM: Tensor) -> None:
    """Recompute h and replace x by its own gradient, in place."""
    R, M = h_RM.shape
    block = min(2048, _block(M))
    _gated_kernel[(R, triton.cdiv(M, block))](x_RX, h_RM, dh_RM, M, True, block, num_warps=4)


@triton.jit
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
    block = min(1024, _block(W))
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
