"""Triton kernels that sample a token from logits in two reads, without writing anything of their size.

N rows, V vocabulary of this rank, C chunks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Logits of a program."""


@triton.jit
def _weights(logits_ptr, at, cols, mask, top, temperature):
    """fp64 exp(logits / temperature - top), rounded to fp32 before; `at`: first logit of the row."""
    x = tl.load(logits_ptr + at + cols, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(mask, tl.exp(x / temperature - top), 0.0).to(tl.float64)


@triton.jit
def _masses_kernel(logits_ptr, top_ptr, out_ptr, V, stride, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = _weights(logits_ptr, row * stride, cols, cols < V, tl.load(top_ptr + row), temperature)
    tl.store(out_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(p, axis=0))


def chunk_masses(logits_NV: Tensor, top_N: Tensor, temperature: float) -> Tensor:
    """fp64 [N, C] sums of exp(logits / temperature - top) over chunks of the vocabulary.

    Args:
        top_N: fp32.
    """
    N, V = logits_NV.shape
    chunks = triton.cdiv(V, CHUNK)
    out = torch.empty(N, chunks, dtype=torch.float64, device=logits_NV.device)
    _masses_kernel[(N, chunks)](
        logits_NV, top_N, out, V, logits_NV.stride(0), float(temperature), CHUNK, num_warps=8
    )  # fmt: skip
    return out


@triton.jit
def _find_kernel(logits_ptr, top_ptr, chunk_ptr, rest_ptr, out_ptr, V, stride, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(chunk_ptr + row).to(tl.int32) * BLOCK
    cols = begin + tl.arange(0, BLOCK)
    p = _weights(logits_ptr, row * stride, cols, cols < V, tl.load(top_ptr + row), temperature)
    before = tl.cumsum(p, axis=0) <= tl.load(rest_ptr + row)
    first = tl.min(tl.where(before, 2147483647, cols), axis=0)
    last = tl.max(tl.where(p > 0, cols, -1), axis=0)  # rounding may put `rest` past it
    tl.store(out_ptr + row, tl.maximum(tl.minimum(first, last), begin).to(tl.int64))  # `last` of NaN: -1


def find_in_chunk(
    logits_NV: Tensor, top_N: Tensor, temperature: float, chunk_N: Tensor, rest_N: Tensor
) -> Tensor:  # fmt: skip
    """int64 [N] first entry of a chunk up to which the chunk's mass exceeds `rest`; at most its last with any.

    Args:
        chunk_N: int64, chunks with mass.
        rest_N: fp64.
    """
    out = torch.empty_like(chunk_N)
    _find_kernel[(len(out),)](
        logits_NV, top_N, chunk_N, rest_N, out, logits_NV.shape[1], logits_NV.stride(0), float(temperature), CHUNK,
        num_warps=8,
    )  # fmt: skip
    return out
