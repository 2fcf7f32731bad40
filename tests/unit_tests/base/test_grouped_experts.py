"""Grouped products of experts equal the loop over experts: one layer, a whole base, ranks that share the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_spec.base import moe
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.moe import LocalExperts
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.config import ParallelConfig
from megatron_spec.config.machine import Machine
from megatron_spec.ops import plain
from megatron_spec.ops.moe import Stacked, gated, mixed, mixed_by_groups
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.tiny import make_batch, save_mixtral
from tests.unit_tests.families import families
from tests.worlds import run_world

pytestmark = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch 2.10")


class GatedExpert(nn.Module):
    def __init__(self, enter: torch.Tensor, leave: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None) -> None:
        super().__init__()
        self.parts = enter, leave, bias, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enter, leave, bias, out = self.parts
        y = gated(x @ enter.t() + bias, 1.5, 1.702) @ leave.t()
        return y if out is None else y + out


@pytest.mark.parametrize(("first", "with_out"), [(0, True), (0, False), (2, True), (4, False)])
def test_one_layer(first: int, with_out: bool) -> None:
    """Experts without rows, and choices of experts on other ranks, are among them."""
    torch.manual_seed(first)
    R, K, H, W, here, E = 13, 2, 16, 8, 2, 6
    x, weights = torch.randn(R, H), torch.rand(R * K)
    chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(R)])  # nobody chooses the last expert
    enter, leave, bias = torch.randn(here, 2 * W, H), torch.randn(here, H, W), torch.randn(here, 2 * W)
    out = torch.randn(here, H) if with_out else None
    modules = [GatedExpert(enter[e], leave[e], bias[e], None if out is None else out[e]) for e in range(here)]
    expected = mixed(x, weights, chosen, nn.ModuleList(modules), first)
    stacked = Stacked(first, enter, leave, (bias, out), 1.5, 1.702)
    found = mixed_by_groups(x, weights.view(R, K), chosen, stacked, plain)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mine = chosen % here  # all experts are here, some twice
    found = mixed_by_groups(x, weights.view(R, K), mine, stacked._replace(first=0), plain)
    torch.testing.assert_close(found, mixed(x, weights, mine, nn.ModuleList(modules)), rtol=1e-5, atol=1e-5)
    assert mixed_by_groups(x[:0], weights.view(R, K)[:0], chosen[:0], stacked, plain).shape == (0, H)


def features(base: FrozenBase, length: int = 24) -> Any:
    from megatron_spec.features.online import OnlineFeatures

    [found] = OnlineFeatures(base).features([make_batch(2, length, 1)])
    return found


def loaded(folder: Path, grouped: bool, **sizes: int) -> FrozenBase:
    layout = ParallelConfig(**sizes)
    ref, world = inspect_base(folder), distributed.initialize(layout)
    setting = Setting(Machine(kernels="plain"), base=ref.config, parallel=layout)
    paths = Paths(setting).without(*([] if grouped else ["grouped_experts"]))
    assert paths.on("grouped_experts") == grouped
    return load_base(ref, world, (1, 3), torch.float32, paths=paths)


def test_a_whole_base_and_its_weights(tmp_path: Path) -> None:
    """Features are equal; parameters become parts of one tensor, and changed ones count; hooks are not bypassed."""
    folder = save_mixtral(tmp_path / "base")
    plain = loaded(folder, False)
    expected, weights = features(plain), {n: p.clone() for n, p in plain.named_parameters()}
    base = loaded(folder, True)
    for _ in range(2):
        torch.testing.assert_close(features(base).captures_SBC, expected.captures_SBC, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(p, weights[n]) for n, p in base.named_parameters())
    experts = next(m for m in base.modules() if isinstance(m, LocalExperts))
    assert experts.local_experts[1].linear_fc1.weight.data_ptr() == experts._matrices("linear_fc1")[1].data_ptr()
    for change in ("in place", "replaced"):
        for some in (plain, base):
            module = next(m for m in some.modules() if isinstance(m, LocalExperts)).local_experts[2].linear_fc2
            with torch.no_grad():
                module.weight.mul_(3) if change == "in place" else None
            if change == "replaced":
                module.weight.data = module.weight.data * 0.5
        torch.testing.assert_close(features(base).state_SBH, features(plain).state_SBH, rtol=1e-5, atol=1e-5)
    calls: list[int] = []
    experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: calls.append(1))
    features(base)
    assert calls


def in_world(folder: Path, layout: dict[str, int]) -> None:
    plain, base = (features(loaded(folder, grouped, **layout)) for grouped in (False, True))
    torch.testing.assert_close(base.captures_SBC, plain.captures_SBC, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # gpt-oss: biases, which one tensor parallel rank adds
@pytest.mark.parametrize("layout", [{"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}])
def test_ranks_that_share_the_experts(tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    families.save(family, tmp_path / "base", vocab_size=96)
    run_world(2, in_world, tmp_path / "base", layout)


def lengths_change(folder: Path, whole: dict[int, torch.Tensor]) -> None:
    """Ranks agree on the number of rows once a forward, and anew in the next one."""
    base = loaded(folder, True, expert_model_parallel_size=2)
    rank = base.world.base_groups.ep.rank()
    for lengths in ((8, 24), (24, 8), (16, 16)):
        with mock.patch.object(moe, "_most_rows", wraps=moe._most_rows) as agreed:
            found = features(base, lengths[rank]).captures_SBC
        torch.testing.assert_close(found, whole[lengths[rank]], rtol=1e-5, atol=1e-5)
        assert agreed.call_count == 1


def test_expert_parallel_ranks_of_other_lengths(tmp_path: Path) -> None:
    folder = save_mixtral(tmp_path / "base")
    base = loaded(folder, False)
    whole = {length: features(base, length).captures_SBC for length in (8, 16, 24)}
    run_world(2, lengths_change, folder, whole)
