"""Triton kernels that split a projection into heads: norms of query and key heads, and the rotary embedding.

Each reads its inputs once and writes its outputs once. Any number of heads and head size works.

Rows are flattened [S * B] (row = s * B + b). R rows, N query heads, G key/value heads, D head size, X = (N + 2G) * D,
E = R + (T - 1) * B rows that carry an embedding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.rows import PARTIALS, WIDE_WARPS, block_of


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
    rotated = is_q | is_k
    cos = tl.where(rotated, cos, 1.0)
    sin = tl.where(rotated, sin, 0.0)
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
            scale = tl.where(rotated, rstd, 1.0)
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
        *(norms or (x, x)), eps, heads, kv_heads, half, block_of(heads + 2 * kv_heads), block_of(half), grouped,
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
def _add_sum(at, x, chosen, inside):
    """Add the sum of the chosen heads."""
    tl.store(at, tl.load(at, mask=inside, other=0.0) + tl.sum(tl.where(chosen, x, 0.0), axis=0), mask=inside)


@triton.jit(do_not_specialize=["R"])
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
    rotated = is_q | is_k
    left_weight = _head_weight(q_norm_ptr + d, k_norm_ptr + d, d < HALF, is_q, is_k)
    right_weight = _head_weight(q_norm_ptr + HALF + d, k_norm_ptr + HALF + d, d < HALF, is_q, is_k)
    left_sum = tl.zeros((SLOTS, LANES), tl.float32)  # of every head: summing heads at the end takes a third of the time
    right_sum = tl.zeros((SLOTS, LANES), tl.float32)
    for i in range(0, tl.cdiv(R - start, step)):
        row = start + i * step
        cos = tl.where(rotated, tl.load(cos_ptr + row * HALF + d, mask=d < HALF, other=1.0), 1.0)
        sin = tl.where(rotated, tl.load(sin_ptr + row * HALF + d, mask=d < HALF, other=0.0), 0.0)
        q_at = q_ptr + row * N * D + q_head * D + d
        k_at = k_ptr + row * G * D + kv_head * D + d
        v_at = v_ptr + row * G * D + kv_head * D + d
        a = _of_heads(q_at, k_at, v_at, is_q, is_k, is_v)
        b = _of_heads(q_at + HALF, k_at + HALF, v_at + HALF, is_q, is_k, is_v)
        left = a * cos + b * sin
        right = b * cos - a * sin
        x_at = row * (N + 2 * G) * D + slot * D + d
        left_x = tl.load(before_ptr + x_at, mask=rotated, other=0.0).to(tl.float32)
        right_x = tl.load(before_ptr + x_at + HALF, mask=rotated, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(left_x * left_x + right_x * right_x, axis=1) / D + eps)[:, None]
        left_x *= rstd
        right_x *= rstd
        left_sum += left * left_x
        right_sum += right * right_x
        left *= left_weight
        right *= right_weight
        along = (tl.sum(left * left_x + right * right_x, axis=1) / D)[:, None]
        scale = tl.where(rotated, rstd, 1.0)  # at values, x is 0 and the weight 1
        out = x_ptr.dtype.element_ty
        tl.store(x_ptr + x_at, (scale * (left - left_x * along)).to(out), mask=used)
        tl.store(x_ptr + x_at + HALF, (scale * (right - right_x * along)).to(out), mask=used)
    at = partial_ptr + start * 2 * D + lanes
    inside = lanes < HALF
    _add_sum(at, left_sum, is_q, inside)
    _add_sum(at + HALF, right_sum, is_q, inside)
    _add_sum(at + D, left_sum, is_k, inside)
    _add_sum(at + D + HALF, right_sum, is_k, inside)


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
        block_of(heads + 2 * kv_heads), block_of(half), num_warps=WIDE_WARPS,
    )  # fmt: skip
