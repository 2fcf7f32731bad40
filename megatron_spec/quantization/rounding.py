"""The E4M3 round trip and its gradient: pure functions (docs/algorithms.md#fp8-fake-quantisation).

Per-tensor: scale = amax / 448, q = cast(clamp(x / scale, -448, 448)), x' = q * scale. The arithmetic is fp32 for any
dtype of x, so training uses exactly the values of the dequantised export:
`fake_quant(x, amax) == dequantize(quantize(x, scale_of(amax)), scale_of(amax))`, bitwise.

The round trip is idempotent for one amax: dividing q * scale by scale changes q by far less than half an E4M3 step,
even when q * scale was stored in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_spec.quantization import nvfp4

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""


def scale_of(amax: Tensor) -> Tensor:
    """fp32 scale of a tensor with largest magnitude `amax`.

    An amax of zero (a tensor of zeros) gives scale 1, because engines divide by the exported scale.
    """
    amax = amax.detach().float()
    tiny = torch.finfo(torch.float32).tiny  # a smaller scale would be denormal, and flushed to zero on some devices
    # Divide by a tensor: with a Python number, CUDA multiplies by the rounded reciprocal, off by a bit.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(tiny)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def amax_of(scale: Tensor) -> Tensor:
    """An amax whose `scale_of` is exactly `scale` (448 * scale may round to a neighbouring number)."""
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


def round_trip_(x: Tensor, amax: Tensor, kernel: bool = False) -> None:
    """`round_trip` in place, by one bitwise equal kernel where the path `rounding_kernel` runs."""
    if kernel and amax.numel() == 1 and x.is_contiguous():
        from megatron_spec.ops.kernels import rounding

        rounding.round_trip(x, amax, out=x)
    else:
        x.copy_(round_trip(x, amax))


def _rounded(
    x: Tensor, amax: Tensor, with_mask: bool, form: str = "fp8", kernel: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(round trip, bool |x| <= amax if requested)."""
    if form == "nvfp4":
        return nvfp4.round_trip(x, amax), (x.detach().abs().float() <= amax) if with_mask else None
    if kernel and amax.numel() == 1:
        from megatron_spec.ops.kernels import rounding

        return rounding.round_trip(x.detach(), amax, with_mask)
    return round_trip(x, amax), (x.detach().abs().float() <= amax) if with_mask else None


class _FakeQuant(torch.autograd.Function):
    """Straight-through estimator: the round trip forward, identity (or a window of +-amax) backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, clipped: bool, form: str, kernel: bool) -> Tensor:
        """See the class."""
        out, inside = _rounded(x, amax, clipped, form, kernel)
        if inside is not None:
            ctx.save_for_backward(inside)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Straight through, or clipped."""
        (grad,) = grads
        if ctx.saved_tensors:
            grad = grad * ctx.saved_tensors[0]
        return grad, None, None, None, None


def fake_quant(x: Tensor, amax: Tensor, clipped: bool = False, form: str = "fp8", kernel: bool = False) -> Tensor:
    """x rounded to E4M3 with the per-tensor range `amax`, in the shape and dtype of x.

    Args:
        x: any shape, fp32 / bf16 / fp16.
        amax: scalar, fp32; values beyond it saturate.
        clipped: the gradient is zero where |x| > amax; otherwise it passes unchanged everywhere (Bengio et al.,
            arXiv 1308.3432).
        form: 'nvfp4' rounds a weight to E2M1 in blocks instead.
        kernel: use the path `rounding_kernel` (x on a GPU, not in fp64): one kernel, bitwise equal.
    """
    return _FakeQuant.apply(x, amax, clipped, form, kernel)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """An already rounded value, with the gradient of `fake_quant`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, inside: Tensor | None) -> Tensor:
        """See the class."""
        if inside is not None:
            ctx.save_for_backward(inside)
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Straight through, or clipped."""
        (grad,) = grads
        return grad * ctx.saved_tensors[0] if ctx.saved_tensors else grad, None, None


class RoundedOnce:
    """Cached round trip of a tensor that does not change for a while (a weight within an optimizer step)."""

    def __init__(self, x: Tensor, amax: Tensor, clipped: bool, form: str = "fp8", kernel: bool = False) -> None:
        with torch.no_grad():
            self.rounded, self.inside = _rounded(x, amax, clipped, form, kernel)

    def of(self, x: Tensor) -> Tensor:
        """`fake_quant(x, amax, clipped)` of the cached x, without rounding again."""
        return _StraightThrough.apply(x, self.rounded, self.inside)  # type: ignore[no-any-return]
