"""The E4M3 round trip and its gradient: pure functions (ALGORITHMS 6).

Per-tensor: scale = amax / 448, q = cast(clamp(x / scale, -448, 448)), x' = q * scale. The arithmetic is fp32 whatever
the dtype of x, so that what training sees is exactly what an exported fp8 tensor becomes when it is multiplied by its
scale: `fake_quant(x, amax) == dequantize(quantize(x, scale_of(amax)), scale_of(amax))`, bit for bit.

The round trip is idempotent for one amax: dividing q * scale by scale moves q by far less than half an E4M3 step, even
when q * scale was stored in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""


def scale_of(amax: Tensor) -> Tensor:
    """fp32 scale of a tensor whose largest magnitude is `amax`.

    An amax of zero (a tensor of zeros) gives scale 1, because engines divide by the exported scale.
    """
    amax = amax.detach().float()
    tiny = torch.finfo(torch.float32).tiny  # a smaller scale would be denormal, and flushed to zero on some devices
    # Divided by a tensor: CUDA multiplies by the rounded reciprocal of a number, and the scale would differ by a bit.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(tiny)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def amax_of(scale: Tensor) -> Tensor:
    """An amax whose `scale_of` is `scale` exactly (448 * scale may round to a neighbour)."""
    guess = scale.float() * E4M3_MAX
    infinity = torch.full_like(guess, torch.inf)
    for candidate in (guess, torch.nextafter(guess, infinity), torch.nextafter(guess, -infinity)):
        if torch.equal(scale_of(candidate), scale.float()):
            return candidate
    raise AssertionError(f"no amax gives scale {scale}")


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale (both on one device) as float8_e4m3fn, round to nearest even, saturating at +-448. NaN stays NaN."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q * scale in fp32, rounded to `dtype`."""
    return (q.float() * scale).to(dtype)


def round_trip(x: Tensor, amax: Tensor) -> Tensor:
    """`fake_quant` without a gradient."""
    scale = scale_of(amax)
    return dequantize(quantize(x, scale), scale, x.dtype)


class _FakeQuant(torch.autograd.Function):
    """Straight-through estimator: the round trip forward, identity (or a window of +-amax) backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, clipped: bool) -> Tensor:
        if clipped:
            ctx.save_for_backward(x.detach().abs() <= amax)
        return round_trip(x, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if ctx.saved_tensors:
            grad = grad * ctx.saved_tensors[0]
        return grad, None, None


def fake_quant(x: Tensor, amax: Tensor, clipped: bool = False) -> Tensor:
    """x rounded to E4M3 under the per-tensor range `amax`, in the shape and dtype of x.

    Args:
        x: any shape, fp32 / bf16 / fp16.
        amax: scalar, fp32; values beyond it saturate.
        clipped: the gradient is zero where |x| > amax; otherwise it passes unchanged everywhere (Bengio et al.,
            arXiv 1308.3432).
    """
    return _FakeQuant.apply(x, amax, clipped)  # type: ignore[no-any-return]
