"""Triton kernels for attention of blocks of slots over a shared context (`block_attention.py`).

A program handles the query rows of a few adjacent blocks for one key/value head: rows are (block, slot, query head of
the group), which fills a matmul tile although a block has few slots. Blocks are sorted by anchor, so the blocks of a
tile see nearly the same context rows, and the blocks that see a tile of context rows are adjacent. Gradients of keys
need no atomics: those of slots are computed with the tile's queries, those of the context by one program per tile of
context rows.

P blocks, C slots, L context rows, N query heads, G key/value heads, n = N / G, D head size, M rows of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops.block_attention import BlockLayout

FORWARD_ROWS = 128
"""Maximum number of query rows of a tile (exceeded if one head of one block has more)."""
BACKWARD_ROWS = 64
KEYS = 64
"""Context rows of a tile."""
LOG2E = 1.4426950408889634


@triton.jit
def _rows(
    q_ptr, first_ptr, anchor_ptr, tile, part, g, P, C: tl.constexpr, G: tl.constexpr, n: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """(block, slot, valid, offset without D, first row, anchor row, queries) of a tile's rows."""
    m = tl.arange(0, M)
    a = m // (C * HEADS)
    block = tile * BLOCKS + a
    slot = (m // HEADS) % C
    valid = (a < BLOCKS) & (block < P)
    at = ((block.to(tl.int64) * C + slot) * G + g) * n + part * HEADS + m % HEADS
    first = tl.load(first_ptr + block, mask=valid, other=0)
    anchor = tl.load(anchor_ptr + block, mask=valid, other=0)
    return block, slot, valid, at, first, anchor, _matrix(q_ptr, at, valid, D)


@triton.jit
def _matrix(ptr, at, valid, D: tl.constexpr):
    """Load [rows, D] at offsets in rows; 0 for invalid rows."""
    return tl.load(ptr + at[:, None] * D + tl.arange(0, D)[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def _whole_matrix(ptr, at, D: tl.constexpr):
    """`_matrix` of valid rows alone."""
    return tl.load(ptr + at[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _own(tile, g, P, C: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, OWN: tl.constexpr):
    """(block, slot, offset among keys without D, valid) of the slots of a tile's blocks."""
    j = tl.arange(0, OWN)
    a = j // C
    block = tile * BLOCKS + a
    slot = j % C
    return block, slot, (block.to(tl.int64) * C + slot) * G + g, (a < BLOCKS) & (block < P)


@triton.jit
def _sees_own(block, slot, valid, o_block, o_slot, o_valid, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    seen = (block[:, None] == o_block[None, :]) & valid[:, None] & o_valid[None, :]
    if CAUSAL:
        seen = seen & (o_slot[None, :] <= slot[:, None])
    if WINDOW > 0:
        seen = seen & (slot[:, None] - o_slot[None, :] < WINDOW)
    return seen


@triton.jit
def _sees_context(rows, first, anchor, slot, valid, WINDOW: tl.constexpr):
    seen = (rows[None, :] >= first[:, None]) & (rows[None, :] < anchor[:, None]) & valid[:, None]
    if WINDOW > 0:
        seen = seen & (rows[None, :] > (anchor + slot)[:, None] - WINDOW)
    return seen


@triton.jit
def _bounds(first, anchor, valid, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """(begin, whole, end): any row of a tile sees context rows begin..end-1, and all see the tiles before `whole`."""
    low = first
    if WINDOW > 0:
        low = tl.maximum(first, anchor - WINDOW + 1)
    begin = tl.min(tl.where(valid, low, 2147483647), 0)
    whole = begin
    if WINDOW == 0:  # in a window, every row of the tile begins elsewhere
        seen = tl.min(tl.where(valid, anchor, 2147483647), 0) - begin
        one_sequence = tl.max(tl.where(valid, first, 0), 0) == begin
        whole += tl.where(one_sequence, seen // KEYS * KEYS, 0)
    return begin, whole, tl.max(tl.where(valid, anchor, 0), 0)


@triton.jit
def _step(q, k, v, seen, acc, top, mass, scale, MASKED: tl.constexpr):
    """Online-softmax update with one tile of keys, in base 2; unless MASKED, all are seen."""
    s = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    still = new_top
    if MASKED:
        still = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - still[:, None])
    old = tl.exp2(top - still)
    acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, new_top, mass * old + tl.sum(p, 1)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, out_ptr, lse_ptr, first_ptr, anchor_ptr, P, scale, C: tl.constexpr,
    G: tl.constexpr, n: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    block, slot, valid, at, first, anchor, q = _rows(
        q_ptr, first_ptr, anchor_ptr, tile, tl.program_id(2), g, P, C, G, n, D, HEADS, BLOCKS, M
    )
    acc = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    begin, whole, end = _bounds(first, anchor, valid, WINDOW, KEYS)
    for start in range(begin, whole, KEYS):
        place = (start + tl.arange(0, KEYS)).to(tl.int64) * G + g
        k, v = _whole_matrix(keys_ptr, place, D), _whole_matrix(values_ptr, place, D)
        acc, top, mass = _step(q, k, v, True, acc, top, mass, scale, False)
    for start in range(whole, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        place = rows.to(tl.int64) * G + g
        k, v = _matrix(keys_ptr, place, rows < end, D), _matrix(values_ptr, place, rows < end, D)
        seen = _sees_context(rows, first, anchor, slot, valid, WINDOW)
        acc, top, mass = _step(q, k, v, seen, acc, top, mass, scale, True)
    o_block, o_slot, o_at, o_valid = _own(tile, g, P, C, G, BLOCKS, OWN)
    k, v = _matrix(k_ptr, o_at, o_valid, D), _matrix(v_ptr, o_at, o_valid, D)
    seen = _sees_own(block, slot, valid, o_block, o_slot, o_valid, WINDOW, CAUSAL)
    acc, top, mass = _step(q, k, v, seen, acc, top, mass, scale, True)
    mass = tl.where(valid, mass, 1.0)
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * D + tl.arange(0, D)[None, :], out, mask=valid[:, None])
    tl.store(lse_ptr + at, tl.where(valid, top, 0.0) + tl.log2(mass), mask=valid)


@triton.jit
def _weights(q, k, v, do, lse, delta, seen, scale, MASKED: tl.constexpr):
    """(p, ds without the scale of the scores) of a tile of rows and keys; unless MASKED, all are seen."""
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _query_backward_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, first_ptr,
    anchor_ptr, P, scale, plain_scale, C: tl.constexpr, G: tl.constexpr, n: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr,
    OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    d = tl.arange(0, D)
    o_block, o_slot, o_at, o_valid = _own(tile, g, P, C, G, BLOCKS, OWN)
    o_place = o_at[:, None] * D + d[None, :]
    o_k, o_v = _matrix(k_ptr, o_at, o_valid, D), _matrix(v_ptr, o_at, o_valid, D)
    dk = tl.zeros((OWN, D), tl.float32)
    dv = tl.zeros((OWN, D), tl.float32)
    for part in range(n // HEADS):
        block, slot, valid, at, first, anchor, q = _rows(
            q_ptr, first_ptr, anchor_ptr, tile, part, g, P, C, G, n, D, HEADS, BLOCKS, M
        )
        do, lse = _matrix(do_ptr, at, valid, D), tl.load(lse_ptr + at, mask=valid, other=0.0)
        delta = tl.sum(do.to(tl.float32) * _matrix(o_ptr, at, valid, D).to(tl.float32), 1)
        tl.store(delta_ptr + at, delta, mask=valid)
        o_seen = _sees_own(
            block, slot, valid, o_block, o_slot, o_valid, WINDOW, CAUSAL
        )  # a loop keeps shapes: own names
        o_p, o_ds = _weights(q, o_k, o_v, do, lse, delta, o_seen, scale, True)
        dv += tl.dot(tl.trans(o_p.to(do.dtype)), do)
        dk += tl.dot(tl.trans(o_ds.to(q.dtype)), q)
        dq = tl.dot(o_ds.to(q.dtype), o_k)
        begin, _whole, end = _bounds(first, anchor, valid, WINDOW, KEYS)
        # one loop with masks: a second one without, as in the forward, takes more registers than there are
        for start in range(begin, end, KEYS):
            rows = start + tl.arange(0, KEYS)
            at_keys = rows.to(tl.int64) * G + g
            k, v = _matrix(keys_ptr, at_keys, rows < end, D), _matrix(values_ptr, at_keys, rows < end, D)
            seen = _sees_context(rows, first, anchor, slot, valid, WINDOW)
            _p, ds = _weights(q, k, v, do, lse, delta, seen, scale, True)
            dq += tl.dot(ds.to(q.dtype), k)
        place = at[:, None] * D + d[None, :]
        tl.store(dq_ptr + place, (dq * plain_scale).to(dq_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(dk_ptr + o_place, (dk * plain_scale).to(dk_ptr.dtype.element_ty), mask=o_valid[:, None])
    tl.store(dv_ptr + o_place, dv.to(dv_ptr.dtype.element_ty), mask=o_valid[:, None])


@triton.jit
def _add_queries(
    q_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, anchor_ptr, i, g, k, v, rows, dk, dv, P, scale, C: tl.constexpr,
    G: tl.constexpr, n: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr,
    BLOCKS: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dk, dv) of a tile of context rows with what tile `i` of queries adds; those that are not valid are 0."""
    parts: tl.constexpr = n // HEADS
    _block, slot, valid, at, first, anchor, q = _rows(
        q_ptr, first_ptr, anchor_ptr, i // parts, i % parts, g, P, C, G, n, D, HEADS, BLOCKS, M
    )
    do, lse = _matrix(do_ptr, at, valid, D), tl.load(lse_ptr + at, mask=valid, other=0.0)
    delta = tl.load(delta_ptr + at, mask=valid, other=0.0)
    seen = True
    if MASKED:
        seen = _sees_context(rows, first, anchor, slot, valid, WINDOW)
    p, ds = _weights(q, k, v, do, lse, delta, seen, scale, MASKED)
    dv += tl.dot(tl.trans(p.to(do.dtype)), do)
    dk += tl.dot(tl.trans(ds.to(q.dtype)), q)
    return dk, dv


@triton.jit
def _context_backward_kernel(
    q_ptr, keys_ptr, values_ptr, do_ptr, lse_ptr, delta_ptr, dkeys_ptr, dvalues_ptr, first_ptr, anchor_ptr,
    seen_ptr, P, L, scale, plain_scale, C: tl.constexpr, G: tl.constexpr, n: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = n // HEADS
    TILES = tl.num_programs(0)
    tile = tl.program_id(0)
    g = tl.program_id(1)
    rows = tile * KEYS + tl.arange(0, KEYS)
    at_keys = rows.to(tl.int64) * G + g
    k, v = _matrix(keys_ptr, at_keys, rows < L, D), _matrix(values_ptr, at_keys, rows < L, D)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    begin, end = tl.load(seen_ptr + tile) // BLOCKS * parts, tl.cdiv(tl.load(seen_ptr + TILES + tile), BLOCKS) * parts
    whole = tl.cdiv(tl.load(seen_ptr + 2 * TILES + tile), BLOCKS) * parts
    whole = tl.minimum(tl.maximum(whole, begin), end)
    whole_end = tl.maximum(tl.load(seen_ptr + 3 * TILES + tile) // BLOCKS * parts, whole)
    for i in range(whole, whole_end):
        dk, dv = _add_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, anchor_ptr, i, g, k, v, rows, dk, dv, P, scale, C, G, n, D,
            WINDOW, HEADS, BLOCKS, M, False,
        )  # fmt: skip
    for j in range(begin, end - (whole_end - whole)):
        i = tl.where(j < whole, j, j + whole_end - whole)
        dk, dv = _add_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, anchor_ptr, i, g, k, v, rows, dk, dv, P, scale, C, G, n, D,
            WINDOW, HEADS, BLOCKS, M, True,
        )  # fmt: skip
    place = at_keys[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dkeys_ptr + place, (dk * plain_scale).to(dkeys_ptr.dtype.element_ty), mask=(rows < L)[:, None])
    tl.store(dvalues_ptr + place, dv.to(dvalues_ptr.dtype.element_ty), mask=(rows < L)[:, None])


def _tile(C: int, n: int, most: int) -> dict[str, int]:
    """Heads and blocks of a tile of at most `most` rows, and its rows and slots padded to powers of two."""
    heads = max(h for h in range(1, n + 1) if n % h == 0 and (h == 1 or C * h <= most))
    blocks = max(1, most // (C * heads))
    wide = [max(16, triton.next_power_of_2(x)) for x in (blocks * C * heads, blocks * C)]
    return {"HEADS": heads, "BLOCKS": blocks, "M": wide[0], "OWN": wide[1]}


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[P, C, N, D]."""
        q, k, v, keys, values = (x.contiguous() for x in (q, k, v, keys, values))
        P, C, N, D = q.shape
        G = k.shape[2]
        out, lse = torch.empty_like(q), torch.empty(P, C, N, dtype=torch.float32, device=q.device)
        first, anchor = layout.first_P.int(), layout.anchor_P.int()
        tile, scale = _tile(C, N // G, FORWARD_ROWS), D**-0.5
        grid = (triton.cdiv(P, tile["BLOCKS"]), G, N // G // tile["HEADS"])
        if P:
            _forward_kernel[grid](
                q, k, v, keys, values, out, lse, first, anchor, P, scale * LOG2E, C, G, N // G, D, layout.window or 0,
                layout.causal, **tile, KEYS=KEYS, num_warps=8, num_stages=3 if D <= 128 else 2,
            )  # fmt: skip
        ctx.layout = layout
        ctx.save_for_backward(q, k, v, keys, values, out, lse, first, anchor)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values of the block, and keys and values of the context."""
        q, k, v, keys, values, out, lse, first, anchor = ctx.saved_tensors
        layout, do = ctx.layout, do.contiguous()
        P, C, N, D = q.shape
        G, L = k.shape[2], len(keys)
        grads = [torch.empty_like(x) for x in (q, k, v, keys, values)]
        if not P:
            return None, *(x.zero_() for x in grads)
        dq, dk, dv, dkeys, dvalues = grads
        delta = torch.empty_like(lse)  # sums of o * do, which the kernel of the queries leaves to that of the context
        tile, scale, window = _tile(C, N // G, BACKWARD_ROWS), D**-0.5, layout.window or 0
        options = {"KEYS": KEYS, "num_warps": 4 if tile["M"] <= 64 else 8, "num_stages": 2}
        _query_backward_kernel[(triton.cdiv(P, tile["BLOCKS"]), G)](
            q, k, v, keys, values, out, do, lse, delta, dq, dk, dv, first, anchor, P, scale * LOG2E, scale, C, G,
            N // G, D, window, layout.causal, **tile, **options,
        )  # fmt: skip
        own = tile.pop("OWN")
        assert own
        _context_backward_kernel[(triton.cdiv(L, KEYS), G)](
            q, keys, values, do, lse, delta, dkeys, dvalues, first, anchor, _seen_by(layout, L), P, L, scale * LOG2E,
            scale, C, G, N // G, D, window, **tile, **options,
        )  # fmt: skip
        return None, dq, dk, dv, dkeys, dvalues


def _seen_by(layout: BlockLayout, L: int) -> Tensor:
    """int32 [4, tiles of context rows]: (first, end) of the blocks that see any row of a tile, and of those among them
    that see all."""
    start = torch.arange(0, L, KEYS, device=layout.anchor_P.device)
    begin = torch.searchsorted(layout.anchor_P, start, right=True)
    end = torch.searchsorted(layout.first_P, start + KEYS)
    if layout.window is not None:  # it ends elsewhere for every slot
        end = torch.minimum(end, torch.searchsorted(layout.anchor_P, start + KEYS - 1 + layout.window))
        whole = whole_end = begin
    else:
        whole = torch.searchsorted(layout.anchor_P, start + KEYS)
        whole_end = torch.searchsorted(layout.first_P, start, right=True)
    return torch.stack([begin, torch.maximum(begin, end), whole, whole_end]).int()


def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: BlockLayout) -> Tensor:
    """See `block_attention.block_attention`; [P, C, N, D]."""
    out: Tensor = _BlockAttention.apply(layout, q, k, v, keys, values)  # type: ignore[no-untyped-call]
    return out
