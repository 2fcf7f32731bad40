"""Rounding to fp8 (E4M3) by rows and by columns, also of the loss kernel's gradient, against the plain twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import plain
from megatron_spec.ops.fp8 import Fp8Matrix, padded
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS


def draw(*shape: int) -> Tensor:
    """Normal numbers whose rows differ in size."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    return x.bfloat16().to(DEVICE)


def assert_rounded(found: Fp8Matrix, wanted: Fp8Matrix) -> None:
    """Same scales; values are the same but for ties, which a last bit of the quotient decides."""
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-6, atol=0.0)
    a, b = found.values.float(), wanted.values.float()
    if INTERPRETED:  # its conversion loses the carry into the exponent, and rounds subnormal numbers otherwise
        plain_ones = (b.abs().log2().frac() != 0) & (b.abs() > 2.0**-6)
        a, b = a[plain_ones], b[plain_ones]
    assert float((a != b).float().mean()) < 0.01
    torch.testing.assert_close(a, b, rtol=0.14, atol=0.01)


def test_rows() -> None:
    from megatron_spec.ops.kernels import fp8

    x = draw(7, 130)
    assert_rounded(fp8.quantize(x), plain.quantize(x))


@pytest.mark.parametrize(("R", "H"), [(5, 33), (200, 150), (128, 64)])
def test_transposed(R: int, H: int) -> None:
    """Into a part of longer rows, the rest of which stays."""
    from megatron_spec.ops.kernels import fp8

    values = plain.quantize(draw(R, H)).values
    out = torch.full((H, R + 9), 3.0, device=DEVICE).to(torch.float8_e4m3fn)
    fp8.transpose(values, out[:, 4 : 4 + R])
    assert torch.equal(out[:, 4 : 4 + R].float(), values.t().float())
    assert (out[:, :4].float() == 3).all() and (out[:, 4 + R :].float() == 3).all()


@pytest.mark.parametrize(("R", "H"), [(5, 33), (200, 150)])
def test_columns(R: int, H: int) -> None:
    from megatron_spec.ops.kernels import fp8

    x, scale = draw(R, H), torch.rand(R, device=DEVICE) * 1e-3
    found, wanted = (Fp8Matrix.empty(H, padded(R), x.device) for _ in range(2))
    fp8.quantize_columns(x, scale, found)
    plain.quantize_columns(x.float(), scale, wanted)
    for matrix in (found, wanted):
        matrix.values = matrix.values[:, :R]
    assert_rounded(found, wanted)


def test_gradient_of_the_loss() -> None:
    """The kernel rounds what it writes in place of the logits; rows of weight 0 are 0."""
    from megatron_spec.ops.kernels import loss as kernels

    R, U, D = 5, 3, 5000
    logits, teacher = draw(R, D) * 4, draw(U, D) * 4
    rows, weight = torch.tensor([2, 0, 1, 1, 2], device=DEVICE), torch.tensor([1.0, 0.8, 0.0, 0.3, 1.0], device=DEVICE)
    told = (teacher, teacher.float().logsumexp(1), rows, weight, 1.0, False)
    usual, found = logits.clone(), Fp8Matrix.empty(R, D, logits.device)
    expected = kernels.soft_rows(usual, *told)
    for a, b in zip(kernels.soft_rows(logits, *told, found), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(usual, logits)
    assert_rounded(found, plain.quantize(usual))
    assert not found.values[2].float().any() and found.values[0].float().abs().max() == 448
