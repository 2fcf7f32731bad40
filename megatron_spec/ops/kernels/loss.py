"""Triton kernels over vocabulary rows: losses with their gradient.

Two families of losses: soft cross-entropy (or KL), and a * cross-entropy to a label + b * sum_v |q - p|.

A row is read twice, or three times if b > 0 (its gradient needs the mass of q where q < p), and written once; no fp32
value is written to memory. When the vocabulary is sharded over ranks, each pass is a kernel, and the ranks reduce the
row's sums in between.
`losses/vocab_parallel.py` has the plain versions.

R rows, D draft vocabulary, U teacher rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.fp8 import Fp8Matrix

BLOCK = 4096
WARPS = 8
LOW = tl.constexpr(-1.0e30)  # finite, so that a lane without values adds exp(-inf) = 0 instead of NaN


@triton.jit
def _row_kernel(
    z_ptr, z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, weight_ptr, loss_ptr, overlap_ptr, best_ptr, rounded_ptr,
    scale_ptr, D, inverse_temperature, IS_KL: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    _, lse, best = _largest(z_ptr, D, inverse_temperature, BLOCK)
    tl.store(best_ptr + row, best)
    peak = _gradient(
        row, z_ptr, t_ptr, t_stride, rows_ptr, lse_t_ptr, weight_ptr, loss_ptr, overlap_ptr, lse, D,
        inverse_temperature, IS_KL, BLOCK,
    )  # fmt: skip
    if ROUND:
        tl.debug_barrier()  # other threads of this program wrote what a thread reads now
        scale = tl.maximum(peak, 1e-12) / 448.0
        tl.store(scale_ptr + row, scale)
        lanes = tl.arange(0, BLOCK)
        for start in range(0, D, BLOCK):
            cols = start + lanes
            g = tl.load(z_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) / scale
            g = tl.minimum(tl.maximum(g, -448.0), 448.0)
            tl.store(rounded_ptr + row * D + cols, g.to(rounded_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _largest_kernel(z_ptr, z_stride, top_ptr, lse_ptr, best_ptr, D, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, lse, best = _largest(z_ptr + row * z_stride, D, inverse_temperature, BLOCK)
    tl.store(top_ptr + row, top)
    tl.store(lse_ptr + row, lse)
    tl.store(best_ptr + row, best)


@triton.jit
def _gradient_kernel(
    z_ptr, z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, weight_ptr, loss_ptr, overlap_ptr, lse_ptr, D,
    inverse_temperature, IS_KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _gradient(
        row, z_ptr + row * z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, weight_ptr, loss_ptr, overlap_ptr,
        tl.load(lse_ptr + row), D, inverse_temperature, IS_KL, BLOCK,
    )  # fmt: skip


@triton.jit
def _largest(z_ptr, D, inverse_temperature, BLOCK: tl.constexpr):
    """(largest value, log-sum-exp, index of the largest value) of a row."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOW, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, D, BLOCK):
        cols = start + lanes
        # kept in the L2 cache for the second pass; all other data is streamed
        z = tl.load(z_ptr + cols, mask=cols < D, other=float("-inf"), eviction_policy="evict_last")
        z = z.to(tl.float32) * inverse_temperature
        where = tl.where(z > top, cols, where)
        new_top = tl.maximum(top, z)
        mass = mass * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    best = tl.max(top, axis=0)
    lse = best + tl.log(tl.sum(mass * tl.exp(top - best), axis=0))
    return best, lse, tl.min(tl.where(top == best, where, 2147483647), axis=0).to(tl.int64)


@triton.jit
def _log_probabilities(z_ptr, t_ptr, cols, D, lse, lse_t, inverse_temperature, POLICY: tl.constexpr):
    """(log q of the draft, log p of the teacher) at `cols`; -inf outside the row."""
    z = tl.load(z_ptr + cols, mask=cols < D, other=float("-inf"), eviction_policy=POLICY)
    t = tl.load(t_ptr + cols, mask=cols < D, other=float("-inf"), eviction_policy=POLICY)
    return z.to(tl.float32) * inverse_temperature - lse, t.to(tl.float32) * inverse_temperature - lse_t


@triton.jit
def _gradient(
    row, z_ptr, t_ptr, t_stride, rows_ptr, lse_t_ptr, weight_ptr, loss_ptr, overlap_ptr, lse, D, inverse_temperature,
    IS_KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and overlap of a row; its gradient replaces its logits. Returns the gradient's largest magnitude."""
    lanes = tl.arange(0, BLOCK)
    teacher = tl.load(rows_ptr + row).to(tl.int64)
    t_ptr += teacher * t_stride
    lse_t = tl.load(lse_t_ptr + teacher)
    scale = tl.load(weight_ptr + row) * inverse_temperature
    loss = tl.zeros((BLOCK,), tl.float32)
    overlap = tl.zeros((BLOCK,), tl.float32)
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + lanes
        mask = cols < D
        logq, logp = _log_probabilities(z_ptr, t_ptr, cols, D, lse, lse_t, inverse_temperature, "evict_first")
        q, p = tl.exp(logq), tl.exp(logp)
        overlap += tl.minimum(p, q)
        if IS_KL:
            loss += tl.where(mask & (p > 0), p * (logp - logq), 0.0)
        else:
            loss -= tl.where(mask, p * logq, 0.0)
        gradient = ((q - p) * scale).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + cols, gradient, mask=mask)
        peak = tl.maximum(peak, tl.where(mask, tl.abs(gradient.to(tl.float32)), 0.0))
    tl.store(loss_ptr + row, tl.sum(loss, axis=0))
    tl.store(overlap_ptr + row, tl.sum(overlap, axis=0))
    return tl.max(peak, axis=0)


def per_row(count: int, logits_RD: Tensor) -> tuple[Tensor, ...]:
    """`count` outputs, fp32 [R] each, all of them aligned: one that is not would compile the kernels once more."""
    R = len(logits_RD)
    return torch.empty(count, triton.cdiv(R, 4) * 4, dtype=torch.float32, device=logits_RD.device)[:, :R].unbind()


def soft_rows(
    logits_RD: Tensor,
    teacher_UD: Tensor,
    teacher_lse_U: Tensor,
    rows_R: Tensor,
    weight_R: Tensor,
    temperature: float,
    kl: bool,
    rounded: Fp8Matrix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Soft cross-entropy (or KL) of R rows; `logits_RD` is replaced by the gradient of weight * loss.

    Args:
        rounded: output [R, D], the gradient rounded to fp8 while a row is in the L2 cache.

    Returns:
        loss [R], overlap sum_v min(p, q) [R], argmax of the draft [R].
    """
    R, D = logits_RD.shape
    loss, overlap = per_row(2, logits_RD)
    best = torch.empty(R, dtype=torch.int64, device=logits_RD.device)
    if R:
        _row_kernel[(R,)](
            logits_RD, logits_RD.stride(0), teacher_UD, teacher_UD.stride(0), rows_R, teacher_lse_U, weight_R, loss,
            overlap, best, logits_RD if rounded is None else rounded.values, loss if rounded is None else rounded.scale,
            D, 1.0 / temperature, kl, rounded is not None, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return loss, overlap, best


def largest(logits_RD: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(largest value, log-sum-exp, index of the largest value) of logits / temperature, each [R]."""
    R, D = logits_RD.shape
    top, lse = per_row(2, logits_RD)
    best = torch.empty(R, dtype=torch.int64, device=logits_RD.device)
    if R:
        _largest_kernel[(R,)](
            logits_RD, logits_RD.stride(0), top, lse, best, D, 1.0 / temperature, BLOCK, num_warps=WARPS
        )
    return top, lse, best


def soft_shard(
    logits_RD: Tensor,
    teacher_UD: Tensor,
    teacher_lse_U: Tensor,
    rows_R: Tensor,
    weight_R: Tensor,
    lse_R: Tensor,
    temperature: float,
    kl: bool,
) -> tuple[Tensor, Tensor]:
    """`soft_rows` for one rank's shard of the vocabulary: its contributions to loss [R] and overlap [R].

    Args:
        lse_R: fp32 log-sum-exp of logits / temperature over all ranks.
    """
    R, D = logits_RD.shape
    loss, overlap = per_row(2, logits_RD)
    if R:
        _gradient_kernel[(R,)](
            logits_RD, logits_RD.stride(0), teacher_UD, teacher_UD.stride(0), rows_R, teacher_lse_U, weight_R, loss,
            overlap, lse_R, D, 1.0 / temperature, kl, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return loss, overlap


@triton.jit
def _mixed_kernel(
    z_ptr, z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, column_ptr, weight_ptr, loss_ptr, overlap_ptr, best_ptr, D,
    inverse_temperature, a, two_b, IS_L1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    teacher = tl.load(rows_ptr + row).to(tl.int64)
    t_ptr += teacher * t_stride
    lse_t, column = tl.load(lse_t_ptr + teacher), tl.load(column_ptr + teacher)
    inside = (column >= 0) & (column < D)
    # before the reductions, whose barriers keep it before any thread's first write
    label = tl.load(z_ptr + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    _, lse, best = _largest(z_ptr, D, inverse_temperature, BLOCK)
    overlap, mass = 0.0, 0.0
    if IS_L1:
        overlap, mass = _overlap(z_ptr, t_ptr, lse, lse_t, D, inverse_temperature, BLOCK)
    scale = tl.load(weight_ptr + row) * inverse_temperature
    found = _mixed_gradient(
        z_ptr, t_ptr, lse, lse_t, column, mass, D, inverse_temperature, a, two_b, scale, IS_L1, BLOCK
    )
    if not IS_L1:
        overlap = found
    tl.store(best_ptr + row, best)
    tl.store(overlap_ptr + row, overlap)
    tl.store(loss_ptr + row, two_b * (1.0 - overlap) - tl.where(inside, a * (label - lse), 0.0))


@triton.jit
def _mixed_sums_kernel(
    z_ptr, z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, column_ptr, lse_ptr, label_ptr, overlap_ptr, mass_ptr, D,
    inverse_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    teacher = tl.load(rows_ptr + row).to(tl.int64)
    lse, column = tl.load(lse_ptr + row), tl.load(column_ptr + teacher)
    inside = (column >= 0) & (column < D)
    label = tl.load(z_ptr + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - lse
    overlap, mass = _overlap(
        z_ptr, t_ptr + teacher * t_stride, lse, tl.load(lse_t_ptr + teacher), D, inverse_temperature, BLOCK
    )
    tl.store(label_ptr + row, tl.where(inside, label, 0.0))
    tl.store(overlap_ptr + row, overlap)
    tl.store(mass_ptr + row, mass)


@triton.jit
def _mixed_gradient_kernel(
    z_ptr, z_stride, t_ptr, t_stride, rows_ptr, lse_t_ptr, column_ptr, weight_ptr, lse_ptr, mass_ptr, D,
    inverse_temperature, a, two_b, IS_L1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    teacher = tl.load(rows_ptr + row).to(tl.int64)
    _mixed_gradient(
        z_ptr + row * z_stride, t_ptr + teacher * t_stride, tl.load(lse_ptr + row), tl.load(lse_t_ptr + teacher),
        tl.load(column_ptr + teacher), tl.load(mass_ptr + row), D, inverse_temperature, a, two_b,
        tl.load(weight_ptr + row) * inverse_temperature, IS_L1, BLOCK,
    )  # fmt: skip


@triton.jit
def _overlap(z_ptr, t_ptr, lse, lse_t, D, inverse_temperature, BLOCK: tl.constexpr):
    """(sum_v min(p, q), mass of q where q < p) of a row."""
    lanes = tl.arange(0, BLOCK)
    overlap = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + lanes
        logq, logp = _log_probabilities(z_ptr, t_ptr, cols, D, lse, lse_t, inverse_temperature, "evict_last")
        q, p = tl.exp(logq), tl.exp(logp)
        overlap += tl.minimum(p, q)
        mass += tl.where(q < p, q, 0.0)
    return tl.sum(overlap, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _mixed_gradient(
    z_ptr, t_ptr, lse, lse_t, column, mass, D, inverse_temperature, a, two_b, scale, IS_L1: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a row replaces its logits; returns sum_v min(p, q)."""
    lanes = tl.arange(0, BLOCK)
    overlap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + lanes
        logq, logp = _log_probabilities(z_ptr, t_ptr, cols, D, lse, lse_t, inverse_temperature, "evict_first")
        q, p = tl.exp(logq), tl.exp(logp)
        overlap += tl.minimum(p, q)
        g = a * q - tl.where(cols == column, a, 0.0)
        if IS_L1:
            g += two_b * q * (mass - tl.where(q < p, 1.0, 0.0))
        tl.store(z_ptr + cols, (g * scale).to(z_ptr.dtype.element_ty), mask=cols < D)
    return tl.sum(overlap, axis=0)


def mixed_rows(
    logits_RD: Tensor,
    teacher_UD: Tensor,
    teacher_lse_U: Tensor,
    rows_R: Tensor,
    column_U: Tensor,
    weight_R: Tensor,
    temperature: float,
    weights: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """a * cross-entropy to a label + b * sum_v |q - p| of R rows; `logits_RD` is replaced by the weighted gradient.

    Args:
        column_U: int64 column of the label of each teacher row; outside 0 .. D - 1 it adds nothing.
        weights: (a, b).

    Returns:
        loss [R], overlap sum_v min(p, q) [R], argmax of the draft [R].
    """
    R, D = logits_RD.shape
    a, b = weights
    loss, overlap = per_row(2, logits_RD)
    best = torch.empty(R, dtype=torch.int64, device=logits_RD.device)
    if R:
        _mixed_kernel[(R,)](
            logits_RD, logits_RD.stride(0), teacher_UD, teacher_UD.stride(0), rows_R, teacher_lse_U, column_U, weight_R,
            loss, overlap, best, D, 1.0 / temperature, float(a), 2.0 * b, b > 0, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return loss, overlap, best


def mixed_sums(
    logits_RD: Tensor,
    teacher_UD: Tensor,
    teacher_lse_U: Tensor,
    rows_R: Tensor,
    column_U: Tensor,
    lse_R: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's contributions to (log q of the label, overlap, mass of q where q < p), each [R].

    Args:
        lse_R: fp32 log-sum-exp of logits / temperature over all ranks.
    """
    R, D = logits_RD.shape
    label, overlap, mass = per_row(3, logits_RD)
    if R:
        _mixed_sums_kernel[(R,)](
            logits_RD, logits_RD.stride(0), teacher_UD, teacher_UD.stride(0), rows_R, teacher_lse_U, column_U, lse_R,
            label, overlap, mass, D, 1.0 / temperature, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return label, overlap, mass


def mixed_gradient(
    logits_RD: Tensor,
    teacher_UD: Tensor,
    teacher_lse_U: Tensor,
    rows_R: Tensor,
    column_U: Tensor,
    weight_R: Tensor,
    lse_R: Tensor,
    mass_R: Tensor,
    temperature: float,
    weights: tuple[float, float],
) -> None:
    """`mixed_rows` for one rank's shard of the vocabulary: its gradient replaces `logits_RD`.

    Args:
        mass_R: mass of q where q < p, over all ranks.
    """
    R, D = logits_RD.shape
    a, b = weights
    if R:
        _mixed_gradient_kernel[(R,)](
            logits_RD, logits_RD.stride(0), teacher_UD, teacher_UD.stride(0), rows_R, teacher_lse_U, column_U, weight_R,
            lse_R, mass_R, D, 1.0 / temperature, float(a), 2.0 * b, b > 0, BLOCK, num_warps=WARPS,
        )  # fmt: skip
