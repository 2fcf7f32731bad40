"""Grouped products on a GPU in bf16: as far from fp64 as the loop over experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.moe import LocalExperts, Router
from megatron_spec.base.schedule import run_base
from megatron_spec.config import MoeConfig
from megatron_spec.ops import backend
from megatron_spec.ops.moe import Stacked, gated, mixed, mixed_by_groups
from megatron_spec.ops.visibility import Visibility
from tests.gpu.device_events import count_kernels
from tests.gpu.test_fast_paths import CONFIG, distance, make_base, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Expert(nn.Module):
    def __init__(self, enter: torch.Tensor, leave: torch.Tensor) -> None:
        super().__init__()
        self.parts = enter, leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x @ self.parts[0].t(), 0.0, 1.0) @ self.parts[1].t()


@pytest.mark.parametrize(("R", "first"), [(3, 0), (300, 0), (300, 4)])
def test_as_near_to_fp64_as_the_loop(R: int, first: int) -> None:
    torch.manual_seed(0)
    E, here, K, H, W = 16, 8, 4, 256, 128
    enter, leave = torch.randn(here, 2 * W, H).bfloat16() * 0.1, torch.randn(here, H, W).bfloat16() * 0.1
    x, weights = torch.randn(R, H).bfloat16(), torch.rand(R * K).bfloat16()
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(R)])

    def loop(dtype: torch.dtype, device: str) -> torch.Tensor:
        at = [(t.to(device, dtype)) for t in (x, weights, enter, leave)]
        experts = nn.ModuleList(Expert(at[2][e], at[3][e]) for e in range(here))
        return mixed(at[0], at[1], chosen.to(device), experts, first).double().cpu()

    exact, looped = loop(torch.float64, "cpu"), loop(torch.bfloat16, "cuda")
    stacked = Stacked(first, enter.cuda(), leave.cuda(), None, 0.0, 1.0)
    for kind in ("triton", "plain"):
        given = x.cuda(), weights.view(R, K).cuda(), chosen.cuda()
        found = mixed_by_groups(*given, stacked, backend.load(kind)).double().cpu()
        assert (found - exact).norm() <= 1.1 * (looped - exact).norm() and exact.norm() > 0


def base_with(dtype: torch.dtype, chosen: int) -> FrozenBase:
    moe = MoeConfig(num_experts=8, experts_per_token=chosen, intermediate_size=64)
    return make_base(dtype, CONFIG.replace(family="qwen3_moe", qk_norm=True, moe=moe))


@pytest.mark.parametrize("packed", [False, True])
def test_a_whole_base(packed: bool) -> None:
    """As near to fp32 as the loop over experts. Every row passes every expert: bf16 would choose others than fp32."""
    batch, exact, base = make_batch(packed), *(base_with(dtype, 8) for dtype in (torch.float32, torch.bfloat16))
    assert base.paths.on("grouped_experts") and not exact.paths.on("grouped_experts")
    assert base.direct is not None and base.direct.can_run(Visibility.causal())
    wanted, fast = run_base(exact, [batch])[0], run_base(base, [batch])[0]
    for module in base.modules():
        if isinstance(module, (LocalExperts, Router)):
            module.kernels = None
    plain = run_base(base, [batch])[0]
    for f, p, w in zip(fast, plain, wanted, strict=True):
        assert 0 < distance(f, w) <= 1.3 * distance(p, w)


def test_launches_of_a_layer() -> None:
    """Few, none of which waits for the device, and the same result every time."""
    base, batch = base_with(torch.bfloat16, 2), make_batch(False)
    assert base.direct is not None
    layers, counts, found = list(base.direct.layers), [], []
    hidden = base.embed(batch.tokens_BS)
    for count in (len(layers), len(layers) // 2):
        base.direct.layers = layers[:count]
        found += [base.direct(hidden, batch.positions_BS, base.inv_freq, ())[0] for _ in range(2)]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.cuda.set_sync_debug_mode("error")
            try:
                base.direct(hidden, batch.positions_BS, base.inv_freq, ())
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        counts.append(count_kernels(profile))
    assert torch.equal(found[0], found[1])
    a_layer = (counts[0] - counts[1]) / (len(layers) - len(layers) // 2)
    print(f"{a_layer:.1f} kernels a layer")
    assert 0 < a_layer <= 30
