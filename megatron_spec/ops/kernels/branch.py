"""Triton kernels that add the branches of the training-time test to the attention over the trunk (`ttt_attention.py`).

A program handles one row and as many key/value heads as fit into `AT_ONCE` elements, so each value is read once. Any
number of heads and head size works: blocks are padded to powers of two, as Triton requires.

Rows are flattened [S * B] (row = s * B + b). R rows, N query heads, G key/value heads, n = N / G, D head size,
k branches, X = N * D, Y = G * D.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 4096
"""Elements [key/value heads, queries per head, head size] of a program, unless one head has more."""
OF_A_WARP = 1024
"""Elements of a warp: so many that it has all queries of a head, and sums over them need no other warp. With half as
many, the backward takes three times as long."""
STAGES = tl.constexpr(3)
"""Branches that are read ahead."""


@triton.jit
def _places(
    place_ptr, S, B, G: tl.constexpr, n: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    LANES: tl.constexpr, HAS_PLACE: tl.constexpr,
):  # fmt: skip
    """(row, s, b) of this program, its offsets in a row of q [..., n, D], of k [..., D] and in lse, and masks."""
    row = tl.program_id(0).to(tl.int64)
    place = row
    if HAS_PLACE:
        place = tl.load(place_ptr + row).to(tl.int64)
    s = place // B
    b = place % B
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, QUERIES)
    d = tl.arange(0, LANES)
    heads = (g[:, None] < G) & (i[None, :] < n)  # [groups, queries]
    head = g[:, None] * n + i[None, :]
    in_q = head[:, :, None] * D + d[None, None, :]
    in_kv = g[:, None] * D + d[None, :]
    lse_at = (b * (G * n) + head) * S + s
    is_q = heads[:, :, None] & (d < D)[None, None, :]
    is_kv = (g < G)[:, None] & (d < D)[None, :]
    return row, s, b, in_q, in_kv, lse_at, is_q, is_kv, heads


@triton.jit
def _merge_kernel(
    q_ptr, o0_ptr, lse_ptr, k_ptr, v_ptr, out_ptr, place_ptr, branches, branch_stride, o_s, o_b, S, B, scale,
    G: tl.constexpr, n: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, LANES: tl.constexpr,
    HAS_PLACE: tl.constexpr,
):  # fmt: skip
    row, s, b, in_q, in_kv, lse_at, is_q, is_kv, heads = _places(
        place_ptr, S, B, G, n, D, GROUPS, QUERIES, LANES, HAS_PLACE
    )
    q = tl.load(q_ptr + row * (G * n * D) + in_q, mask=is_q, other=0.0).to(tl.float32)
    acc = tl.load(o0_ptr + s * o_s + b * o_b + in_q, mask=is_q, other=0.0).to(tl.float32)
    top = tl.load(lse_ptr + lse_at, mask=heads, other=0.0)
    mass = tl.full((GROUPS, QUERIES), 1.0, tl.float32)
    for i in tl.range(branches, num_stages=STAGES):
        at = i * branch_stride + row * (G * D) + in_kv
        k = tl.load(k_ptr + at, mask=is_kv, other=0.0).to(tl.float32)[:, None, :]
        v = tl.load(v_ptr + at, mask=is_kv, other=0.0).to(tl.float32)[:, None, :]
        score = tl.sum(q * k, axis=2) * scale
        new_top = tl.maximum(top, score)
        old = tl.exp(top - new_top)
        p = tl.exp(score - new_top)
        mass = mass * old + p
        acc = acc * old[:, :, None] + p[:, :, None] * v
        top = new_top
    acc = acc / mass[:, :, None]
    tl.store(out_ptr + row * (G * n * D) + in_q, acc.to(out_ptr.dtype.element_ty), mask=is_q)
    tl.store(lse_ptr + lse_at, top + tl.log(mass), mask=heads)


@triton.jit
def _merge_backward_kernel(
    q_ptr, o_ptr, do_ptr, lse_ptr, k_ptr, v_ptr, place_ptr, dq0_ptr, dq_ptr, dk_ptr, dv_ptr, branches, branch_stride,
    dq_s, dq_b, S, B, scale,
    G: tl.constexpr, n: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, LANES: tl.constexpr,
    HAS_PLACE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row, s, b, in_q, in_kv, lse_at, is_q, is_kv, heads = _places(
        place_ptr, S, B, G, n, D, GROUPS, QUERIES, LANES, HAS_PLACE
    )
    lse = tl.load(lse_ptr + lse_at, mask=heads, other=0.0)
    q_at = row * (G * n * D) + in_q
    q = tl.load(q_ptr + q_at, mask=is_q, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + q_at, mask=is_q, other=0.0).to(tl.float32)
    delta = tl.sum(do * tl.load(o_ptr + q_at, mask=is_q, other=0.0).to(tl.float32), axis=2)
    dq = tl.load(dq0_ptr + s * dq_s + b * dq_b + in_q, mask=is_q, other=0.0).to(tl.float32)
    for i in tl.range(branches, num_stages=STAGES):
        at = i * branch_stride + row * (G * D) + in_kv
        k = tl.load(k_ptr + at, mask=is_kv, other=0.0).to(tl.float32)[:, None, :]
        v = tl.load(v_ptr + at, mask=is_kv, other=0.0).to(tl.float32)[:, None, :]
        if not FIRST:  # read ahead, like k and v: the next branches are elsewhere
            dk_before = tl.load(dk_ptr + at, mask=is_kv, other=0.0)
            dv_before = tl.load(dv_ptr + at, mask=is_kv, other=0.0)
        p = tl.exp(tl.sum(q * k, axis=2) * scale - lse)
        ds = p * (tl.sum(do * v, axis=2) - delta) * scale
        dq += ds[:, :, None] * k
        dk = tl.sum(ds[:, :, None] * q, axis=1)  # a padded query is zero, and so is its do
        dv = tl.sum(p[:, :, None] * do, axis=1)
        if not FIRST:
            dk += dk_before
            dv += dv_before
        tl.store(dk_ptr + at, dk, mask=is_kv)
        tl.store(dv_ptr + at, dv, mask=is_kv)
    tl.store(dq_ptr + q_at, dq.to(dq_ptr.dtype.element_ty), mask=is_q)


@dataclass
class _Launch:
    """Grid and block sizes of a launch."""

    grid: tuple[int, int]
    sizes: tuple[int, int, int, int, int, int]
    warps: int

    @staticmethod
    def of(rows: int, heads: int, kv_heads: int, head_dim: int) -> _Launch:
        """Launch with as many key/value heads per program as fit into `AT_ONCE` elements."""
        each = heads // kv_heads
        queries, lanes = (int(triton.next_power_of_2(x)) for x in (each, head_dim))
        groups = min(int(triton.next_power_of_2(kv_heads)), max(1, AT_ONCE // (queries * lanes)))
        sizes = (kv_heads, each, head_dim, groups, queries, lanes)
        warps = min(8, max(1, groups * queries * lanes // OF_A_WARP))
        return _Launch((rows, triton.cdiv(kv_heads, groups)), sizes, warps)


def _dense_heads(x_BSND: Tensor) -> Tensor:
    dense = x_BSND.stride(2) == x_BSND.shape[3] and x_BSND.stride(3) == 1
    return x_BSND if dense else x_BSND.contiguous()


def merge_forward(
    q_RX: Tensor,
    o0_BSND: Tensor,
    lse_BNS: Tensor,
    k_TRY: Tensor,
    v_TRY: Tensor,
    out_RX: Tensor,
    place_R: Tensor | None = None,
) -> None:
    """Add branches (rows' own keys of later steps) to the attention over the trunk: see `ttt_attention`.

    Args:
        q_RX: rotated queries [R, N*D].
        o0_BSND: output over the trunk, any strides over B and S, heads dense.
        lse_BNS: its log-sum-exp (fp32, contiguous), replaced by the merged one.
        k_TRY, v_TRY: branches [k, R, G*D] (k may be 0).
        out_RX: merged output.
        place_R: positions s * B + b of the rows; None: all rows.
    """
    B, S, N, D = o0_BSND.shape
    o0_BSND = _dense_heads(o0_BSND)
    assert lse_BNS.is_contiguous()
    launch = _Launch.of(len(q_RX), N, k_TRY.shape[-1] // D, D)
    _merge_kernel[launch.grid](
        q_RX, o0_BSND, lse_BNS, k_TRY, v_TRY, out_RX, q_RX if place_R is None else place_R, k_TRY.shape[0],
        k_TRY.stride(0), o0_BSND.stride(1), o0_BSND.stride(0), S, B, D**-0.5, *launch.sizes, place_R is not None,
        num_warps=launch.warps,
    )  # fmt: skip


def merge_backward(
    q_RX: Tensor,
    o_RX: Tensor,
    do_RX: Tensor,
    lse_BNS: Tensor,
    k_TRY: Tensor,
    v_TRY: Tensor,
    dq0_BSND: Tensor,
    dq_RX: Tensor,
    dk_TRY: Tensor,
    dv_TRY: Tensor,
    first: bool,
    place_R: Tensor | None = None,
) -> None:
    """Backward of `merge_forward`: gradients of the branches, and the complete dq.

    Args:
        dq0_BSND: the trunk's dq from the flash backward, any strides over B and S.
        dq_RX: output, complete gradient of q.
        dk_TRY, dv_TRY: fp32 sums over draft steps, shaped like k and v; overwritten if `first`, else accumulated.
    """
    dq0_BSND = _dense_heads(dq0_BSND)
    B, S, N, D = dq0_BSND.shape
    assert k_TRY.shape[0] == 0 or dk_TRY.stride() == k_TRY.stride()
    launch = _Launch.of(len(q_RX), N, k_TRY.shape[-1] // D, D)
    _merge_backward_kernel[launch.grid](
        q_RX, o_RX, do_RX, lse_BNS, k_TRY, v_TRY, q_RX if place_R is None else place_R, dq0_BSND, dq_RX, dk_TRY, dv_TRY,
        k_TRY.shape[0], k_TRY.stride(0), dq0_BSND.stride(1), dq0_BSND.stride(0), S, B, D**-0.5, *launch.sizes,
        place_R is not None, first, num_warps=launch.warps,
    )  # fmt: skip
