"""The gradient norm on the device, and whose implementation is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron_spec.training import kernels, optimizer


def test_the_norm_of_all_tensors() -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * n for n in (1, 5, 1000, 0)]
    expected = torch.cat(tensors).double().norm()
    found, nothing = optimizer._norm(65536, torch.zeros(1), [tensors[:2], tensors[2:]], False)
    assert found.shape == (1,) and found.dtype == torch.float32 and nothing is None
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=0)


def test_it_takes_the_place_of_megatron_cores_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    optimizer._norm_without_waits()
    gradients = [torch.arange(3.0), torch.arange(4.0)]
    assert clip_grads.l2_norm_impl is optimizer._norm
    found = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False)[0]
    assert float(found) == pytest.approx(19**0.5)


@pytest.mark.parametrize(
    ("module", "expected"),
    [("transformer_engine_torch", "Transformer Engine"), ("amp_C", "apex"), ("megatron_spec.training", "torch")],
)
def test_whose_implementation(module: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: Any) -> None: ...

    theirs.__module__ = module
    monkeypatch.setattr(clip_grads, "l2_norm_impl", theirs)
    optimizer._norm_without_waits()
    assert clip_grads.l2_norm_impl is theirs and f"gradient norm of {expected}," in kernels.described()
