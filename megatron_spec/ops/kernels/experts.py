"""Triton kernels around the grouped products of experts: choice, order of rows, activation, weighted sum.

The plain twins are in `ops.plain.experts`. Nothing waits for the device, and no kernel
recompiles for another number of rows.

R rows (tokens), K experts per token, P = R * K choices, E experts of this rank, H hidden, W width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.config import MoeConfig
from megatron_spec.ops import moe as plain
from megatron_spec.ops.kernels.rows import block_of

CHOICE_ROWS = 8
COUNT_ROWS = 16
"""Rows of a program of the choice and of the count."""
BLOCKS_AT_ONCE = 512
"""Counts of an expert that are summed at once."""
GATE_VALUES = 4096
"""Values of gate and up in a program of the activation."""
WIDEST = 4096
"""Most columns of a program."""


@triton.jit
def _keys(ranked, lanes, mask, LANES: tl.constexpr):
    """int64 in the order of `ranked`, all different: the first of equal values is the largest; NaN counts as -inf."""
    bits = tl.where(ranked == ranked, ranked, float("-inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ordered.to(tl.int64) * 4294967296 + (LANES - 1 - lanes)[None, :].to(tl.int64)
    return tl.where(mask, keys, -9223372036854775807)


@triton.jit(do_not_specialize=["R"])
def _choose_kernel(
    logits_ptr, bias_ptr, weight_ptr, chosen_ptr, R, E, scale, tiny,
    K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SIGMOID: tl.constexpr, OF_CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    mask = (rows < R)[:, None] & (lanes < E)[None, :]
    x = tl.load(logits_ptr + rows[:, None] * E + lanes[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    scores = x
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    elif not OF_CHOSEN:
        powers = tl.exp(x - tl.max(x, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + lanes, mask=lanes < E, other=0.0).to(tl.float32)[None, :]
    keys = _keys(ranked, lanes, mask, LANES)
    place = tl.full((ROWS, LANES), -1, tl.int32)
    for k in tl.static_range(K):
        best = keys == tl.max(keys, axis=1)[:, None]
        place = tl.where(best, k, place)
        keys = tl.where(best, -9223372036854775807, keys)
    chosen = (place >= 0) & mask
    if OF_CHOSEN:
        top = tl.max(tl.where(chosen, x, float("-inf")), axis=1)
        powers = tl.where(chosen, tl.exp(x - top[:, None]), 0.0)
        weights = powers / tl.sum(powers, axis=1)[:, None]
    else:
        weights = scores
        if NORMALIZE:
            weights = weights / (tl.sum(tl.where(chosen, scores, 0.0), axis=1) + tiny)[:, None]
        weights *= scale
    at = rows[:, None] * K + place
    tl.store(weight_ptr + at, weights, mask=chosen)
    tl.store(chosen_ptr + at, tl.broadcast_to(lanes[None, :], (ROWS, LANES)), mask=chosen)


def choose_experts(logits_RE: Tensor, moe: MoeConfig, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ops.moe.choose`: (fp32 weights [R, K], int32 experts [R, K]); among equal scores the first experts.

    A choice by groups of experts runs in torch.
    """
    if moe.groups > 1:
        return plain.choose(logits_RE, moe, bias_E)
    (R, E), K = logits_RE.shape, moe.experts_per_token
    logits_RE = logits_RE.contiguous()
    weights = torch.empty(R, K, dtype=torch.float32, device=logits_RE.device)
    chosen = torch.empty(R, K, dtype=torch.int32, device=logits_RE.device)
    sigmoid, of_chosen = moe.router == "sigmoid", moe.router == "softmax_of_chosen"
    with_bias = bias_E is not None and not of_chosen
    _choose_kernel[(triton.cdiv(R, CHOICE_ROWS),)](
        logits_RE, bias_E if with_bias else logits_RE, weights, chosen, R, E, float(moe.scale),
        1e-20 if sigmoid else 0.0, K, CHOICE_ROWS, block_of(E), sigmoid, of_chosen, with_bias, moe.normalize,
        num_warps=4,
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["R", "first", "blocks"])
def _count_kernel(
    chosen_ptr, rank_ptr, count_ptr, R, first, blocks, E,
    K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Per block of rows: rows of each expert, and of each choice how many before it are of the same expert."""
    block = tl.program_id(0)
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    taken = tl.zeros((ROWS, LANES), tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(chosen_ptr + rows * K + k, mask=rows < R, other=-1).to(tl.int32) - first
        taken += (expert[:, None] == lanes[None, :]).to(tl.int32)
    before = tl.cumsum(taken, axis=0) - taken
    for k in tl.static_range(K):
        expert = tl.load(chosen_ptr + rows * K + k, mask=rows < R, other=-1).to(tl.int32) - first
        here = (expert[:, None] == lanes[None, :]).to(tl.int32)
        tl.store(rank_ptr + rows * K + k, tl.sum(here * before, axis=1), mask=rows < R)
        before += here
    tl.store(count_ptr + lanes * blocks + block, tl.sum(taken, axis=0), mask=lanes < E)


@triton.jit(do_not_specialize=["blocks"])
def _before_kernel(count_ptr, total_ptr, blocks, BLOCK: tl.constexpr):
    """Rows of each expert: in the blocks before a block (in place of the block's own), and of all blocks."""
    expert = tl.program_id(0)
    total = tl.full((), 0, tl.int32)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts = tl.load(count_ptr + expert * blocks + at, mask=at < blocks, other=0)
        tl.store(count_ptr + expert * blocks + at, total + tl.cumsum(counts, axis=0) - counts, mask=at < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(total_ptr + expert, total)


@triton.jit(do_not_specialize=["first", "blocks"])
def _copy_rows_kernel(
    x_ptr, chosen_ptr, rank_ptr, before_ptr, total_ptr, place_ptr, end_ptr, out_ptr, first, blocks, E, H,
    K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    choices = tl.arange(0, CHOICES)
    totals = tl.load(total_ptr + lanes, mask=lanes < E, other=0)
    expert = tl.load(chosen_ptr + row * K + choices, mask=choices < K, other=-1).to(tl.int32) - first
    here = (choices < K) & (expert >= 0) & (expert < E)
    start = tl.sum(tl.where(lanes[None, :] < expert[:, None], totals[None, :], 0), axis=1)
    place = start + tl.load(before_ptr + expert * blocks + (row // ROWS).to(tl.int32), mask=here, other=0)
    place += tl.load(rank_ptr + row * K + choices, mask=here, other=0)
    place = tl.where(here, place, -1)
    if tl.program_id(1) == 0:
        tl.store(place_ptr + row * K + choices, place, mask=choices < K)
        if row == 0:
            tl.store(end_ptr + lanes, tl.cumsum(totals, axis=0), mask=lanes < E)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + cols, mask=cols < H, other=0.0)
    for k in tl.static_range(K):
        at = tl.sum(tl.where(choices == k, place, 0), axis=0).to(tl.int64)
        width = tl.where(at >= 0, H, 0)  # an absent row has no columns
        tl.store(out_ptr + at * H + cols, x, mask=cols < width)


def sort_rows(x_RH: Tensor, chosen_RK: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the rows in the order of their experts, for experts first .. first + count - 1; R is not 0.

    Returns:
        rows [P, H], those of an expert in the order of R, after all of them undefined ones; int32 [R, K], the row of
        every choice, -1 for an expert that is not here; int32 [count], one more than each expert's last row.
    """
    (R, H), K, device = x_RH.shape, chosen_RK.shape[1], x_RH.device
    x_RH, chosen_RK, blocks = x_RH.contiguous(), chosen_RK.contiguous(), triton.cdiv(R, COUNT_ROWS)

    def _new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    rank, place, counts, totals, ends = _new(R, K), _new(R, K), _new(count, blocks), _new(count), _new(count)
    rows_PH = x_RH.new_empty(R * K, H)
    lanes, block = block_of(count), min(WIDEST, block_of(H))
    _count_kernel[(blocks,)](
        chosen_RK, rank, counts, R, first, blocks, count, K, COUNT_ROWS, lanes, num_warps=4
    )  # fmt: skip
    _before_kernel[(count,)](counts, totals, blocks, BLOCKS_AT_ONCE, num_warps=4)
    _copy_rows_kernel[(R, triton.cdiv(H, block))](
        x_RH, chosen_RK, rank, counts, totals, place, ends, rows_PH, first, blocks, count, H,
        K, block_of(K), COUNT_ROWS, lanes, block, num_warps=8,
    )  # fmt: skip
    return rows_PH, place, ends


@triton.jit(do_not_specialize=["P"])
def _gate_rows_kernel(
    x_ptr, end_ptr, bias_ptr, out_ptr, P, E, W, clamp, alpha,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(end_ptr + E - 1)  # later rows are no expert's
    mask = (rows < P)[:, None] & (rows < last)[:, None] & (cols < W)[None, :]
    at = rows[:, None] * 2 * W + cols[None, :]
    gate = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + W, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        lanes = tl.arange(0, LANES)
        ends = tl.load(end_ptr + lanes, mask=lanes < E, other=2147483647)
        expert = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)
        bias_at = expert[:, None] * 2 * W + cols[None, :]
        gate += tl.load(bias_ptr + bias_at, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + bias_at + W, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:
        gate = tl.minimum(gate, clamp)
        up = tl.minimum(tl.maximum(up, -clamp), clamp) + 1.0
    out = gate * up / (1.0 + tl.exp(-gate * alpha))
    tl.store(out_ptr + rows[:, None] * W + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def gate_rows(x_PX: Tensor, ends_E: Tensor, bias_EX: Tensor | None, clamp: float, alpha: float) -> Tensor:
    """[P, W] activation of rows [gate | up] [P, 2W] in the order of `sort_rows` (see `ops.moe.gated`).

    Args:
        bias_EX: added to the rows of each expert.
    """
    P, E, W = len(x_PX), len(ends_E), x_PX.shape[1] // 2
    out = x_PX.new_empty(P, W)
    block = min(1024, block_of(W))
    rows = max(1, GATE_VALUES // block)
    _gate_rows_kernel[(triton.cdiv(P, rows), triton.cdiv(W, block))](
        x_PX, ends_E, x_PX if bias_EX is None else bias_EX, out, P, E, W, float(clamp), float(alpha) if clamp else 1.0,
        rows, block_of(E), block, bias_EX is not None, clamp > 0, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first"])
def _mix_rows_kernel(
    x_ptr, place_ptr, weight_ptr, chosen_ptr, bias_ptr, out_ptr, first, H,
    K: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + row * K + k).to(tl.int64)
        mask = cols < tl.where(place >= 0, H, 0)  # an absent row has no columns
        x = tl.load(x_ptr + place * H + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(chosen_ptr + row * K + k).to(tl.int64) - first
            x += tl.load(bias_ptr + expert * H + cols, mask=mask, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + row * K + k).to(tl.float32)
    tl.store(out_ptr + row * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


def mix_rows(
    x_PH: Tensor, place_RK: Tensor, weights_RK: Tensor, chosen_RK: Tensor, first: int, bias_EH: Tensor | None
) -> Tensor:
    """[R, H] weighted sum of the rows at `place_RK` (-1: none), each plus the bias of its expert."""
    (R, K), H = place_RK.shape, x_PH.shape[1]
    out, block = x_PH.new_empty(R, H), min(WIDEST, block_of(H))
    _mix_rows_kernel[(R, triton.cdiv(H, block))](
        x_PH, place_RK, weights_RK.contiguous(), chosen_RK.contiguous(), x_PH if bias_EH is None else bias_EH, out,
        first, H, K, block, bias_EH is not None, num_warps=8,
    )  # fmt: skip
    return out
