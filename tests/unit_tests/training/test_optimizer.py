"""Updates against torch's AdamW; the gradient norm on the device, and whose implementation is used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron_spec.runtime import platform
from megatron_spec.training import kernels, optimizer
from tests.unit_tests.training.test_kernels import Run, gradient

SETTINGS: dict[str, Any] = dict(
    train_iters=9, lr=3e-2, min_lr=4e-3, lr_decay_style="cosine", lr_decay_iters=6, lr_warmup_iters=2, weight_decay=0.3,
    adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-2, clip_grad=0.5,
)  # fmt: skip


def rate(step: int) -> float:
    """Linear warm-up from 0, then half a cosine down to min_lr."""
    if step <= 2:
        return 3e-2 * step / 2
    return 4e-3 + (3e-2 - 4e-3) * (1 + math.cos(math.pi * min(1.0, (step - 2) / (6 - 2)))) / 2


def test_updates_are_those_of_adamw_with_schedule_and_clipping() -> None:
    platform.activate()
    run = Run("torch", **SETTINGS)
    twins = [p.detach().clone().requires_grad_() for p in run.draft.parameters()]
    groups = [  # norms and biases are not decayed
        {"params": [p for p in twins if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in twins if p.dim() == 1], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-2)
    for step in range(9):
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        for i, p in enumerate(twins):
            p.grad = gradient(p, step, i)
        assert torch.nn.utils.clip_grad_norm_(twins, 0.5) > 0.5
        adamw.step()
        run.steps(step, step + 1)
        for found, expected in zip(run.draft.parameters(), twins, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_settings_take_the_place_of_restored_ones() -> None:
    platform.activate()
    run = Run("torch", **SETTINGS)
    optimizer.apply_settings(run.optimizer, run.train.replace(lr=1e-3, min_lr=1e-4, adam_beta1=0.7, adam_eps=1e-5))
    for group in run.optimizer.param_groups:
        assert (group["max_lr"], group["min_lr"], group["eps"], group["betas"]) == (1e-3, 1e-4, 1e-5, (0.7, 0.9))


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
