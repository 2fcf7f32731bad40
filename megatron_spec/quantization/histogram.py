"""Histogram of magnitudes with one fixed bin per positive bfloat16 number, so histograms of ranks and steps add up.

A value falls into the bin of the smallest bfloat16 not below it. For bfloat16 data every value has its own bin, and
percentile, clipped share and rounding error are exact; for float32 data they are accurate to half a percent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.quantization.rounding import round_trip

BINS = 1 << 15
"""Bit patterns of a bfloat16 without its sign."""
_INFINITY = 0x7F80


def empty(device: torch.device | str) -> Tensor:
    """int64 [BINS] of zeros."""
    return torch.zeros(BINS, dtype=torch.int64, device=device)


def magnitudes(x: Tensor) -> Tensor:
    """int64 [BINS]: histogram of the magnitudes of x. NaN counts as infinity."""
    bits = x.detach().abs().to(torch.float32).flatten().view(torch.int32)
    index = (bits.clamp(max=_INFINITY << 16) + 0xFFFF) >> 16  # rounded up
    return torch.bincount(index.clamp_(max=_INFINITY), minlength=BINS)


def bin_values(device: torch.device | str) -> Tensor:
    """fp32 [BINS]: the magnitude of each bin; 0 for the unused bins past infinity."""
    index = torch.arange(BINS, dtype=torch.int32, device=device)
    return (torch.where(index <= _INFINITY, index, 0) << 16).view(torch.float32)


def percentile(histogram: Tensor, percent: float) -> Tensor:
    """fp32 scalar: the smallest magnitude not exceeded by at least `percent` % of the values; 0 when empty."""
    running = histogram.cumsum(0)
    wanted = torch.ceil(running[-1].double() * (percent / 100)).long()
    place = torch.searchsorted(running, wanted.clamp(min=1)).clamp(max=BINS - 1)
    return bin_values(histogram.device)[place]


def clipped_share(histogram: Tensor, amax: Tensor) -> float:
    """Share of the values above `amax`."""
    # A value equal to amax may fall into the bin above it (float32 rounded up).
    ceiling = bin_values(histogram.device)[(magnitudes(amax) > 0).nonzero()[0, 0]]
    above = histogram[bin_values(histogram.device) > ceiling].sum()
    return float(above / histogram.sum().clamp(min=1))


def rounding_error(histogram: Tensor, amax: Tensor) -> float:
    """|x - q(x)| / |x| over all observed values with the range `amax`, including clipping."""
    values = bin_values(histogram.device)
    finite = values.isfinite()
    values, counts = values[finite], histogram[finite].double()
    error = (values - round_trip(values, amax)).double().square()
    norm = float((counts * values.double().square()).sum())
    return (float((counts * error).sum()) / norm) ** 0.5 if norm else 0.0
