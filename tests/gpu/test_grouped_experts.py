"""Grouped products on a GPU in bf16: as far from fp64 as the loop over experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_spec.ops import backend
from megatron_spec.ops.moe import Stacked, gated, mixed, mixed_by_groups

pytestmark = pytest.mark.gpu


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
