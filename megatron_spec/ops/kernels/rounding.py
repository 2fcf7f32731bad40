"""The E4M3 round trip as one Triton kernel: one read, one write, bitwise equal to the plain version.

Rounding to E4M3 uses integer arithmetic on float32 bit patterns, so it also runs on GPUs without fp8 (and gives the
same result in the interpreter): a float32 has 20 mantissa bits more than E4M3's three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _round_trip_kernel(x_ptr, amax_ptr, out_ptr, inside_ptr, size, MASK: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    amax = tl.load(amax_ptr)
    # scale_of: amax / 448, at least the smallest normal number; 1 for a tensor of zeros
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    scale = tl.where(amax == 0.0, 1.0, scale)
    stored = tl.load(x_ptr + place, mask=there, other=0.0)
    x = stored.to(tl.float32)
    y = tl.div_rn(x, tl.zeros_like(x) + scale)
    bits = y.to(tl.int32, bitcast=True)
    sign = bits & -2147483648
    size_bits = bits & 0x7FFFFFFF
    magnitude = tl.minimum(size_bits.to(tl.float32, bitcast=True), 448.0)
    # From 2^-6 on: three mantissa bits, ties to even. A carry correctly increments the exponent.
    pattern = magnitude.to(tl.int32, bitcast=True)
    pattern = (pattern + 0x7FFFF + ((pattern >> 20) & 1)) & -1048576
    normal = pattern.to(tl.float32, bitcast=True)
    # Below: steps of 2^-9. Numbers between 2^14 and 2^15 have this step, so adding one of them rounds to it.
    tiny = (magnitude + 16384.0) - 16384.0
    rounded = tl.where(magnitude < 0.015625, tiny, normal)
    rounded = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    rounded = tl.where(size_bits > 0x7F800000, y, rounded)  # NaN stays NaN
    result = rounded * scale
    if stored.dtype == tl.bfloat16:  # explicit ties to even: the interpreter's conversion truncates
        pattern = result.to(tl.int32, bitcast=True)
        even = ((pattern + 0x7FFF + ((pattern >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        result = tl.where(result == result, even, result)
    tl.store(out_ptr + place, result.to(stored.dtype), mask=there)
    if MASK:
        tl.store(inside_ptr + place, tl.abs(x) <= amax, mask=there)


def round_trip(
    x: Tensor, amax: Tensor, with_mask: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`fake_quant.round_trip` of x under a scalar amax; with_mask: also bool |x| <= amax.

    Args:
        out: output, contiguous; may be x.
    """
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    inside = torch.empty_like(x, dtype=torch.bool) if with_mask else None
    size = x.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _round_trip_kernel[grid](x, amax, out, out if inside is None else inside, size, with_mask, BLOCK)
    return out, inside
