"""fp32 products by oneDNN: only where they stay in fp32, and not in torch's attention."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_spec.runtime import platform

Product = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that oneDNN is asked for, before it is; afterwards all is as it was."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(platform, "_mkl_precision", None)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def _once(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _pair(x: Tensor) -> Tensor:
    return _once(x) + _once(x - _once(x))


@pytest.mark.parametrize("rounded", [_once, _pair])
@pytest.mark.parametrize("side", [0, 1])
def test_refused_where_products_round(
    monkeypatch: pytest.MonkeyPatch, rounded: Callable[[Tensor], Tensor], side: int
) -> None:
    exact: Product = torch.matmul

    def product(*factors: Tensor) -> Tensor:
        return exact(*(rounded(x) if i == side else x for i, x in enumerate(factors)))

    monkeypatch.setattr(torch, "matmul", product)
    assert not platform.multiply_with_onednn()
    assert torch.get_float32_matmul_precision() == "highest"


def test_used_where_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    exact: Product = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda x, y: exact(x.double(), y.double()).float())
    assert platform.multiply_with_onednn()
    assert torch.get_float32_matmul_precision() == "medium"


def test_refused_on_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not platform.multiply_with_onednn()
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_are_in_fp32_whatever_was_chosen() -> None:
    platform.multiply_with_onednn()
    torch.manual_seed(0)
    x, y = torch.randn(300, 700), torch.randn(700, 50)
    for a, b in ((x, y), (x[:1], y), (x.t().contiguous().t(), y), (x.view(3, 100, 700), y.expand(3, 700, 50))):
        assert torch.allclose((a @ b).double(), a.double() @ b.double(), rtol=0, atol=5e-4)


def test_with_mkl_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = platform.with_mkl(lambda: torch.get_float32_matmul_precision())
    assert inside() == "highest"
    monkeypatch.setattr(platform, "_mkl_precision", "highest")
    torch.set_float32_matmul_precision("medium")
    assert inside() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"

    @platform.with_mkl
    def fails() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert torch.get_float32_matmul_precision() == "medium"
