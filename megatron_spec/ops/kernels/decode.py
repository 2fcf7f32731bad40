"""Attention of decoding, where a step is many small kernels: one over all that it needs.

The kernel goes from the projection of the new rows to the attention output. It adds the bias, takes the norms of
heads, rotates, writes the new keys and values into the cache, and reads no more of the cache than the sequence has.

The output of a row is the same to the last bit whether it is computed alone or among others, beside few sequences or
many, and whatever `key_slots` is. Otherwise greedy text would differ between the base alone (one row) and a
verification (several) wherever two logits are equal in bf16. Keys are taken in the order of their slots, new or cached,
in blocks. Parts of several blocks, which begin at the same slots in every sequence, have a softmax each, and the parts
are merged in their order. Where sequences are few, every part has a program, and the last one to finish merges; else
one program goes through all parts. Both run the same binary, and sums of two products, which a compiler may round in
two ways, are spelt out (`tl.fma`).

R = S * B rows (row = s * B + b), S new rows of each of B sequences, N query and G key/value heads, D head size,
X = (N + 2G) * D, L cache slots, M tree nodes.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 64
"""Cache slots that a program reads at a time."""
LEVELS = ((0, 128), (2048, 512), (8192, 2048), (32768, 8192))
"""(slot, size of the parts that begin from there on): few parts, however long the sequence, and short ones where it is
short."""
AT_ONCE: tl.constexpr = tl.constexpr(4)
"""Parts of other programs that are read together."""
TILE = 16
"""Rows (s, query head) of a program: one size, so that a row's sums do not depend on the other rows."""
COUNTERS = 1 << 16


@triton.jit
def _rotated(
    x_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, row, col, mask, d, eps, X, ANGLES: tl.constexpr,
    HALF: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """fp32 heads that begin at columns `col` of rows `row`, with bias and norm, rotated."""
    other = tl.where(d < HALF, d + HALF, d - HALF)
    sign = tl.where(d < HALF, -1.0, 1.0)
    angle = tl.where(d < HALF, d, d - HALF)
    x = tl.load(x_ptr + row * X + col + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + row * X + col + other, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + col + d, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(bias_ptr + col + other, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / (2 * HALF) + eps)[:, None]
        x *= rstd * tl.load(norm_ptr + d, mask=d < 2 * HALF, other=0.0).to(tl.float32)
        y *= rstd * tl.load(norm_ptr + other, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * ANGLES + angle, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * ANGLES + angle, mask=mask, other=0.0).to(tl.float32)
    return x * cos + y * sin * sign


@triton.jit
def _columns(g, i, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUPED: tl.constexpr):
    """First columns of query heads `i` [.., 1], key and value of key/value head g in a projection."""
    n: tl.constexpr = N // G
    if GROUPED:  # megatron-core: per key/value head its n query heads, then k, then v
        q_col = (g * (n + 2) + i) * D
        k_col = (g * (n + 2) + n) * D
        v_col = k_col + D
    else:
        q_col = (g * n + i) * D
        k_col = (N + g) * D
        v_col = (N + G + g) * D
    return q_col[:, None], k_col, v_col


def parts_of(slots: int) -> int:
    """Parts of a sequence of so many slots."""
    ends = [begin for begin, _ in LEVELS[1:]] + [max(slots, LEVELS[-1][0])]
    return sum(
        triton.cdiv(max(0, min(slots, end) - begin), size) for (begin, size), end in zip(LEVELS, ends, strict=True)
    )


@triton.jit
def _part_at(slot):
    """Number of the part that a slot is in; see `LEVELS`."""
    first = tl.where(slot < 2048, slot // 128, 16 + (slot - 2048) // 512)
    return tl.where(slot < 8192, first, tl.where(slot < 32768, 28 + (slot - 8192) // 2048, 40 + (slot - 32768) // 8192))


@triton.jit
def _begin_of(part):
    """First slot of a part."""
    first = tl.where(part < 16, part * 128, 2048 + (part - 16) * 512)
    return tl.where(part < 28, first, tl.where(part < 40, 8192 + (part - 28) * 2048, 32768 + (part - 40) * 8192))


@triton.jit
def _merged(best, sums, values, top, total, acc):
    """Softmax (largest score in log2, sum, weighted values) over the keys of two; the second may be of none."""
    higher = tl.maximum(best, top)
    shift = tl.where(higher == -float("inf"), 0.0, higher)  # a row may see none of these keys
    faded, share = tl.exp2(best - shift), tl.exp2(top - shift)
    sums = tl.fma(sums, faded, total * share)
    values = tl.fma(values, tl.broadcast_to(faded[:, None], values.shape), acc * share[:, None])
    return higher, sums, values


@triton.jit
def _turned(slot, best, sums, values, top, total, acc):
    """Where a part begins at `slot`: the part before, (top, total, acc), merged into the others, and a new one."""
    turn = _begin_of(_part_at(slot)) == slot
    higher, more, both = _merged(best, sums, values, top, total, acc)
    best, sums, values = tl.where(turn, higher, best), tl.where(turn, more, sums), tl.where(turn, both, values)
    top, total, acc = tl.where(turn, -float("inf"), top), tl.where(turn, 0.0, total), tl.where(turn, 0.0, acc)
    return best, sums, values, top, total, acc


@triton.jit
def _attended(q, k, v, seen, scale, top, total, acc, PRECISION: tl.constexpr):
    """Softmax over more keys: (largest score in log2, sum, weighted values) with k, v where `seen`."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(higher == -float("inf"), 0.0, higher)  # a row may see none of these keys
    p = tl.exp2(scores - shift[:, None])
    faded = tl.exp2(top - shift)
    total = tl.fma(total, faded, tl.sum(p, axis=1))
    acc = acc * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _new_keys(
    x_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, row, at, new, k_col, v_col, lanes, eps, store, X,
    ANGLES: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Keys and values [slots, LANES] of the new rows `row` where `new`; written to the cache at `at` if `store`."""
    inside = lanes < 2 * HALF
    k = _rotated(
        x_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, row, k_col, new, lanes, eps, X, ANGLES, HALF, HAS_BIAS, NORM
    )
    v = tl.load(x_ptr + row * X + v_col + lanes, mask=new, other=0.0).to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias_ptr + v_col + lanes, mask=inside, other=0.0).to(tl.float32)
    k = k.to(key_ptr.dtype.element_ty)
    v = v.to(key_ptr.dtype.element_ty)
    if store:
        tl.store(key_ptr + at, k, mask=new)
        tl.store(value_ptr + at, v, mask=new)
    return k, v


@triton.jit
def _seen(slot, first, s, end, above, tree, live, TREE: tl.constexpr):
    """Which slots the rows of a tile see. `tree`: slot of the first node, `above`: rows of the tree's mask."""
    seen = (slot < end)[None, :] & live[:, None]
    if TREE:
        node = (slot - tree)[None, :]
        seen = seen & (tl.load(above + node, mask=seen & (node >= 0), other=1) != 0)
    else:
        seen = seen & (slot[None, :] <= first + s[:, None])
    return seen


@triton.jit
def _over_cache(
    q, key_ptr, value_ptr, cached, begin, old, first, s, end, above, tree, live, lanes, scale, best, sums, values, top,
    total, acc, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_attended`, part by part, over the slots from `begin` to `old`, which are in the cache at `cached`."""
    for block in range(begin, old, BLOCK):
        slot = block + tl.arange(0, BLOCK)
        where = cached + slot.to(tl.int64)[:, None] * (G * D) + lanes
        k = tl.load(key_ptr + where, mask=lanes < D, other=0.0)
        v = tl.load(value_ptr + where, mask=lanes < D, other=0.0)
        seen = _seen(slot, first, s, end, above, tree, live, TREE)
        best, sums, values, top, total, acc = _turned(block, best, sums, values, top, total, acc)
        top, total, acc = _attended(q, k, v, seen, scale, top, total, acc, PRECISION)
    return best, sums, values, top, total, acc


@triton.jit
def _new_and_cached(
    x_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, slot, first, end, b, B, cached, k_col, v_col,
    lanes, eps, store, G: tl.constexpr, D: tl.constexpr, X: tl.constexpr, ANGLES: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK, LANES] of slots of which those from `first` on are new, the others in the cache."""
    where = cached + slot.to(tl.int64)[:, None] * (G * D) + lanes
    new = ((slot >= first) & (slot < end))[:, None] & (lanes < D)
    row = ((slot - first) * B + b).to(tl.int64)[:, None]
    fresh_k, fresh_v = _new_keys(
        x_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, row, where, new, k_col, v_col, lanes, eps,
        store, X, ANGLES, HALF, HAS_BIAS, NORM,
    )  # fmt: skip
    kept = (slot < first)[:, None] & (lanes < D)
    k = tl.where(new, fresh_k, tl.load(key_ptr + where, mask=kept, other=0.0))
    v = tl.where(new, fresh_v, tl.load(value_ptr + where, mask=kept, other=0.0))
    return k, v


@triton.jit
def _store_part(part_ptr, stat_ptr, mine, top, total, acc, lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """What a part adds to the softmax of its rows, out before the program is counted."""
    r = tl.arange(0, ROWS)
    tl.store(stat_ptr + mine * 2 * ROWS + r, top)
    tl.store(stat_ptr + (mine * 2 + 1) * ROWS + r, total)
    tl.store(part_ptr + (mine * ROWS + r)[:, None] * LANES + lanes, acc)
    tl.debug_barrier()


@triton.jit
def _sum_of_parts(part_ptr, stat_ptr, begin, active, lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """(sum, weighted values) over the `active` parts of a sequence, which other programs have written from `begin`
    on."""
    r = tl.arange(0, ROWS)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, LANES), tl.float32)
    for some in range(0, active, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = r * 0 + some + i < active
            at = stat_ptr + (begin + some + i) * 2 * ROWS + r
            top = tl.load(at, mask=there, other=-float("inf"), cache_modifier=".cg")
            total = tl.load(at + ROWS, mask=there, other=0.0, cache_modifier=".cg")
            here = part_ptr + ((begin + some + i) * ROWS + r)[:, None] * LANES + lanes
            acc = tl.load(here, mask=there[:, None] & (lanes >= 0), other=0.0, cache_modifier=".cg")
            best, sums, values = _merged(best, sums, values, top, total, acc)
    return sums, values


@triton.jit(do_not_specialize=["B", "S", "M", "tiles", "parts"])
def _attention_kernel(
    x_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, first_ptr, above_ptr, key_ptr, value_ptr, out_ptr,
    part_ptr, stat_ptr, count_ptr, B, S, M, tiles, parts, first_stride, cache_stride, scale, eps,
    N: tl.constexpr, G: tl.constexpr, ANGLES: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    n: tl.constexpr = N // G
    D: tl.constexpr = 2 * HALF
    X: tl.constexpr = (N + 2 * G) * D
    place, part = tl.program_id(0), tl.program_id(1)  # place: (sequence, key/value head, tile of rows)
    tile, b, g = place % tiles, (place // tiles) // G, (place // tiles) % G
    first = tl.load(first_ptr + b * first_stride).to(tl.int32)
    end = first + S
    split = parts > 1  # every part has a program; padding may be longer than `key_slots`
    active = tl.where(split, tl.minimum(_part_at(end - 1) + 1, parts), 1)
    begin = tl.where(split, _begin_of(part), 0)
    stop = tl.where(split, tl.minimum(_begin_of(part + 1), end), end)
    if part >= active:
        return
    t = tile * ROWS + tl.arange(0, ROWS)
    s = t // n
    live = t < S * n
    row = (s * B + b).to(tl.int64)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    q_col, k_col, v_col = _columns(g, t % n, N, G, D, GROUPED)
    own = live[:, None] & (lanes < D)
    q = _rotated(
        x_ptr, bias_ptr, q_norm_ptr, cos_ptr, sin_ptr, row, q_col, own, lanes, eps, X, ANGLES, HALF, HAS_BIAS, NORM
    ).to(key_ptr.dtype.element_ty)
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    best, sums, values = top, total, acc  # of the parts before
    above = above_ptr + (b.to(tl.int64) * S + s)[:, None] * M
    tree = end - M
    cached = b.to(tl.int64) * cache_stride + g * D
    old = tl.minimum(first // BLOCK * BLOCK, stop)  # blocks before it are in the cache
    best, sums, values, top, total, acc = _over_cache(
        q, key_ptr, value_ptr, cached, begin, old, first, s, end, above, tree, live, lanes, scale, best, sums, values,
        top, total, acc, G, D, BLOCK, TREE, PRECISION,
    )  # fmt: skip
    for block in tl.range(tl.maximum(begin, old), stop, BLOCK, num_stages=1):  # one or two: not worth the memory
        slot = block + tl.arange(0, BLOCK)
        k, v = _new_and_cached(
            x_ptr, bias_ptr, k_norm_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, slot, first, end, b, B, cached, k_col,
            v_col, lanes, eps, tile == 0, G, D, X, ANGLES, HALF, HAS_BIAS, NORM,
        )  # fmt: skip
        seen = _seen(slot, first, s, end, above, tree, live, TREE)
        best, sums, values, top, total, acc = _turned(block, best, sums, values, top, total, acc)
        top, total, acc = _attended(q, k, v, seen, scale, top, total, acc, PRECISION)
    best, sums, values = _merged(best, sums, values, top, total, acc)
    at = out_ptr + row * (N * D) + ((g * n + t % n) * D)[:, None] + lanes
    if split:
        _store_part(part_ptr, stat_ptr, place * parts + part, best, sums, values, lanes, ROWS, LANES)
        if tl.atomic_add(count_ptr + place, 1, sem="acq_rel") == active - 1:
            tl.store(count_ptr + place, 0)
            sums, values = _sum_of_parts(part_ptr, stat_ptr, place * parts, active, lanes, ROWS, LANES)
            tl.store(at, (values / tl.where(live, sums, 1.0)[:, None]).to(out_ptr.dtype.element_ty), mask=own)
    else:
        tl.store(at, (values / tl.where(live, sums, 1.0)[:, None]).to(out_ptr.dtype.element_ty), mask=own)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """int32 zeros, one per place that several programs share; every kernel leaves them zero. Kept: graphs hold their
    address."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def decode_attention(
    x_RX: Tensor,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    first_B: Tensor,
    heads: int,
    kv_heads: int,
    key_slots: int,
    bias_X: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    above_BSM: Tensor | None = None,
    grouped: bool = True,
) -> Tensor:
    """[R, N * D] attention of new rows over a layer's cache, from their projection; writes their keys and values.

    Args:
        x_RX: projection, without its bias.
        tables: (cos, sin) of the rows' positions; the first D / 2 columns are read.
        cache: keys and values [B, L, G, D] of the layer; rows of sequences may be apart.
        first_B: int64, slot of the first new row of each sequence; the others follow it.
        key_slots: upper bound of the slots, the new ones included. Sequences that are longer get no useful output.
        norms: weights [D] of the RMS norms (`eps`) over query and key heads, before rotation.
        above_BSM: bool, new row s sees tree node m; the nodes are in the last M slots, which end with the new rows.
            None: causal.
        grouped: columns are those of megatron-core's linear_qkv, else all q, all k, all v.
    """
    (B,), R, half = first_B.shape, len(x_RX), cache[0].shape[3] // 2
    S, D, n = R // B, 2 * half, heads // kv_heads
    tiles = triton.cdiv(S * n, TILE)
    places, lanes = B * kv_heads * tiles, max(16, int(triton.next_power_of_2(D)))
    parts = 1 if places >= _processors(x_RX.device) else parts_of(key_slots)
    out = x_RX.new_empty(R, heads * D)
    scratch = x_RX.new_empty(places * parts * TILE * (lanes + 2) if parts > 1 else 0, dtype=torch.float32)
    stats = scratch[places * parts * TILE * lanes :]
    above = x_RX if above_BSM is None else above_BSM.contiguous().view(torch.uint8)
    assert parts == 1 or places <= COUNTERS
    _attention_kernel[(places, parts)](
        x_RX, x_RX if bias_X is None else bias_X, *(norms or (x_RX, x_RX)), *tables, first_B, above, *cache, out,
        scratch, stats, counters(x_RX.device), B, S, 0 if above_BSM is None else above_BSM.shape[2], tiles, parts,
        first_B.stride(0), cache[0].stride(0), D**-0.5 * 1.4426950408889634, eps, heads, kv_heads, tables[0].shape[1],
        half, lanes, TILE, SLOTS, grouped, bias_X is not None, norms is not None, above_BSM is not None,
        "ieee" if x_RX.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=3 if lanes * x_RX.element_size() <= 512 else 1,  # of keys and values in shared memory
    )  # fmt: skip
    return out
