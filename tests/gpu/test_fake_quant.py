"""The fused round trip equals the plain one bit for bit, gradients included.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernel itself on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.quantization import rounding
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cases(dtype: torch.dtype) -> Tensor:
    """Ordinary values, every E4M3 code and the places halfway between two of them, zeros and extremes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[~codes.isnan()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    around = torch.cat(
        [between, torch.nextafter(between, torch.tensor(1e9)), torch.nextafter(between, -torch.tensor(1e9))]
    )
    normal = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 65504.0, -65504.0, torch.inf, -torch.inf, torch.nan])
    return torch.cat([codes, around, normal, normal * 1e-3, special]).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [448.0, 3.3, 1e-6, 1e-44, 0.0, 1e5])
def test_equal_bits(dtype: torch.dtype, amax: float) -> None:
    from megatron_spec.ops.kernels import rounding as kernels

    x, limit = cases(dtype), torch.tensor(amax, device=DEVICE)
    found, inside = kernels.round_trip(x, limit, with_mask=True)
    expected = rounding.round_trip(x, limit)
    assert torch.equal(found.isnan(), expected.isnan())
    as_integer = torch.int32 if dtype == torch.float32 else torch.int16
    same = found.view(as_integer) == expected.view(as_integer)
    assert bool((same | expected.isnan()).all()), (x[~same], found[~same], expected[~same])
    assert inside is not None and torch.equal(inside, x.abs().float() <= limit)
    place = x.clone()
    kernels.round_trip(place, limit, out=place)
    assert bool(((place.view(as_integer) == found.view(as_integer)) | found.isnan()).all())


@pytest.mark.skipif(INTERPRETED, reason="the plain way is taken on the CPU")
@pytest.mark.parametrize("clipped", [False, True])
def test_fake_quant_by_the_kernel(clipped: bool) -> None:
    torch.manual_seed(0)
    x, amax = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16), torch.tensor(1.0, device="cuda")
    weight = torch.randn_like(x)
    results = []
    for use in (True, False):
        leaf = x.clone().requires_grad_()
        out = rounding.fake_quant(leaf, amax, clipped, kernel=use)
        (out * weight).sum().backward()
        results.append((out.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
