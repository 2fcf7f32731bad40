"""The E4M3 round trip: golden values, saturation, gradients, idempotence."""

import pytest
import torch

from megatron_spec.quantization.rounding import amax_of, dequantize, fake_quant, quantize, round_trip, scale_of

# Hand-computed E4M3 (4 exponent bits, bias 7; 3 mantissa bits): input -> nearest representable, ties to even.
GOLDEN = {
    0.0: 0.0,
    1.0: 1.0,
    1.0625: 1.0,  # tie between 1 and 1.125 -> even mantissa
    1.07: 1.125,
    1.1875: 1.25,  # tie between 1.125 and 1.25 -> even mantissa
    17.0: 16.0,  # step is 2 between 16 and 32
    17.1: 18.0,
    447.0: 448.0,
    448.0: 448.0,
    1e6: 448.0,  # saturates instead of NaN
    2.0**-9: 2.0**-9,  # smallest subnormal
    2.0**-10: 0.0,  # tie between 0 and 2**-9 -> even
    2.0**-10 * 1.01: 2.0**-9,
    240.1: 240.0,
}


@pytest.mark.parametrize(("value", "expected"), GOLDEN.items())
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_golden_values(value: float, expected: float, sign: float) -> None:
    amax = torch.tensor(448.0)  # scale 1
    assert fake_quant(torch.tensor([sign * value]), amax).item() == sign * expected


def test_scale_follows_amax() -> None:
    x = torch.tensor([1.0, -7.0, 3.3])
    scale = scale_of(torch.tensor(7.0))
    assert scale.dtype == torch.float32
    assert scale.item() == pytest.approx(7 / 448, rel=1e-7)
    assert fake_quant(x, torch.tensor(7.0)).tolist() == pytest.approx([1.0, -7.0, 3.25], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_exported_tensor_dequantised(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * 0.03).to(dtype)
    amax = x.float().abs().max() * 0.9  # some saturate
    scale = scale_of(amax)
    stored = quantize(x, scale)
    assert stored.dtype == torch.float8_e4m3fn
    assert torch.equal(fake_quant(x, amax), dequantize(stored, scale, dtype))
    assert fake_quant(x, amax).dtype == dtype
    assert not torch.equal(fake_quant(x, amax), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idempotent_for_every_code(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    for amax in torch.tensor([1e-6, 0.0371, 1.0, 3.3, 1000.0]):
        values = dequantize(codes, scale_of(amax), dtype)
        assert torch.equal(round_trip(values, amax), values)
        assert torch.equal(quantize(values, scale_of(amax)).view(torch.uint8), codes.view(torch.uint8))


def test_zero_amax() -> None:
    zero = torch.tensor(0.0)
    assert scale_of(zero).item() == 1.0
    assert fake_quant(torch.zeros(3), zero).tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(fake_quant(torch.tensor([1e-30, 1e30]), torch.tensor(1e-44))).all()


def test_nan_is_not_hidden() -> None:
    assert fake_quant(torch.tensor([float("nan")]), torch.tensor(1.0)).isnan().all()


@pytest.mark.parametrize(("clipped", "expected"), [(False, [2.0, 3.0, 5.0, 7.0]), (True, [2.0, 3.0, 0.0, 0.0])])
def test_straight_through_gradient(clipped: bool, expected: list[float]) -> None:
    x = torch.tensor([0.3, -1.0, 1.5, -2.0], requires_grad=True)
    (fake_quant(x, torch.tensor(1.0), clipped) * torch.tensor([2.0, 3.0, 5.0, 7.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == expected


def test_amax_of_inverts_scale_of() -> None:
    torch.manual_seed(1)
    for amax in torch.rand(500) * 10:
        scale = scale_of(amax)
        assert torch.equal(scale_of(amax_of(scale)), scale)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_equals_cpu_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    amax = torch.rand(1000) * 10
    assert torch.equal(scale_of(amax.cuda()).cpu(), scale_of(amax))
    x = torch.randn(1000, 64).to(dtype)
    assert torch.equal(round_trip(x.cuda(), amax.cuda()[:, None]).cpu(), round_trip(x, amax[:, None]))
