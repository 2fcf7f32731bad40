"""Triton kernel of the teacher: a row of whole logits, restricted to the draft vocabulary, and its sums in one program.

`drafts/teacher.py` has the plain version. R rows, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_spec.ops.kernels.loss import BLOCK, LOW, WARPS


@triton.jit
def _teacher_kernel(
    whole_ptr, whole_stride, ids_ptr, draft_ids_ptr, out_ptr, lse_ptr, argmax_ptr, label_ptr, inside_ptr, V, D,
    inverse_temperature, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    whole_ptr += row * whole_stride
    out_ptr += row * D
    lanes = tl.arange(0, BLOCK)
    if KNOWN:
        argmax = tl.load(argmax_ptr + row)
    else:
        top = tl.full((BLOCK,), LOW, tl.float32)
        where = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            cols = start + lanes
            z = tl.load(whole_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            where = tl.where(z > top, cols, where)
            top = tl.maximum(top, z)
        best = tl.max(top, axis=0)
        argmax = tl.min(tl.where(top == best, where, 2147483647), axis=0).to(tl.int64)
        tl.store(argmax_ptr + row, argmax)
    top = tl.full((BLOCK,), LOW, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, D, BLOCK):
        cols = start + lanes
        mask = cols < D
        token = tl.load(ids_ptr + cols, mask=mask, other=0)
        raw = tl.load(whole_ptr + token, mask=mask, other=float("-inf"))
        tl.store(out_ptr + cols, raw, mask=mask)
        z = raw.to(tl.float32) * inverse_temperature
        where = tl.where(z > top, cols, where)
        new_top = tl.maximum(top, z)
        mass = mass * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    best = tl.max(top, axis=0)
    tl.store(lse_ptr + row, best + tl.log(tl.sum(mass * tl.exp(top - best), axis=0)))
    best_id = tl.min(tl.where(top == best, where, 2147483647), axis=0).to(tl.int64)
    draft_id = tl.load(draft_ids_ptr + argmax).to(tl.int64)
    tl.store(label_ptr + row, tl.where(draft_id >= 0, draft_id, best_id))
    tl.store(inside_ptr + row, draft_id >= 0)


def teacher_rows(
    whole_RV: Tensor,
    target_ids_D: Tensor,
    draft_ids_V: Tensor,
    temperature: float,
    logits_RD: Tensor,
    argmax_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The teacher of R rows from full-vocabulary logits; the restricted logits are written to `logits_RD`.

    Args:
        target_ids_D: target id of every draft id.
        draft_ids_V: draft id of every target id, -1 outside the draft vocabulary.
        argmax_R: argmax of the whole logits, if known; else it is computed.

    Returns:
        log-sum-exp over the draft vocabulary [R] fp32, argmax over the full vocabulary [R], label [R], inside [R]
        (see `vocab_parallel.Teacher`).
    """
    R, device = whole_RV.shape[0], whole_RV.device
    lse = torch.empty(R, dtype=torch.float32, device=device)
    label = torch.empty(R, dtype=torch.int64, device=device)
    argmax = torch.empty_like(label) if argmax_R is None else argmax_R
    inside = torch.empty(R, dtype=torch.bool, device=device)
    if R:
        assert logits_RD.is_contiguous()
        _teacher_kernel[(R,)](
            whole_RV, whole_RV.stride(0), target_ids_D, draft_ids_V, logits_RD, lse, argmax, label, inside,
            whole_RV.shape[1], len(target_ids_D), 1.0 / temperature, argmax_R is not None, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return lse, argmax, label, inside
