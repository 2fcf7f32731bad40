"""A linear whose rows and weight gradient are shared by ranks equals the linear, and its draft the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_spec.config import ObjectiveConfig, ParallelConfig
from megatron_spec.config.machine import Machine
from megatron_spec.ops import shared_linear
from megatron_spec.planning.paths import NO_PATHS, Paths, Setting
from megatron_spec.runtime import distributed
from tests.unit_tests.drafts.plain_eagle3 import eagle_config
from tests.unit_tests.drafts.test_eagle_parallel import outcome
from tests.worlds import run_world

TP2 = ParallelConfig(tensor_model_parallel_size=2)


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
    pays = shared_linear.pays(x, len(weight), group)
    return shared_linear.shared_linear(x, weight, bias, group) if pays else F.linear(x, weight, bias)


def products(group: Any, shape: tuple[int, ...], outputs: int, gathered: list[int]) -> tuple[list[Tensor], int]:
    """(differences of output and gradients from the linear's, gathers)."""
    generator = torch.Generator().manual_seed(3)
    sizes = (shape, (outputs, 6), (outputs,), (*shape[:-1], outputs))
    x, weight, bias, grad = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in sizes)
    found, before = [], len(gathered)
    for run in (lambda a, w, b: projected(a, w, b, group), F.linear):
        a, w, b = (t.clone().requires_grad_() for t in (x, weight, bias))
        out = run(a, w, b)
        out.backward(grad)
        found.append([out.detach(), a.grad, w.grad, b.grad])
    return [(a - b).abs().max() for a, b in zip(*found, strict=True)], len(gathered) - before


def drafts(group: Any, gathered: list[int]) -> dict[str, int]:
    """Gathers of drafts whose outcome is that of each rank's own projection."""
    options = {"algorithm": "eagle3.1", "fc_bias": True, "norm_before_fc": True, "fc_norm": True}
    found, least = {}, shared_linear.FEWEST_ROWS
    for name, changes, fused in (("fused", {}, True), ("plain", {}, False), ("norms before fc", options, False)):
        config, both = eagle_config(**changes), []
        paths = Paths(Setting(Machine(kernels="plain"), parallel=TP2, draft=config)) if fused else NO_PATHS
        for rows in (1 << 30, least):
            shared_linear.FEWEST_ROWS, before = rows, len(gathered)
            both.append(outcome(config, ObjectiveConfig(ttt_steps=3), group, False, paths))
            found[name] = len(gathered) - before
        for key, x in both[0].items():
            torch.testing.assert_close(both[1][key], x, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    return found


def ranks() -> dict[str, Any]:
    group, gathered = distributed.initialize(TP2).tp, []
    inner = dist.all_gather_into_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_linear, "FEWEST_ROWS", 8)
        patch.setattr(dist, "all_gather_into_tensor", lambda *a, **k: gathered.append(1) or inner(*a, **k))
        told = {
            "even": products(group, (4, 2, 6), 10, gathered), "odd rows": products(group, (3, 3, 6), 10, gathered),
            "odd outputs": products(group, (4, 2, 6), 5, gathered), "few": products(group, (2, 2, 6), 10, gathered),
        }  # fmt: skip
        with torch.no_grad():
            projected(torch.ones(8, 6), torch.ones(4, 6), None, group)
        return {"products": told, "unrecorded": len(gathered), "drafts": drafts(group, gathered)}


def test_equals_the_linear() -> None:
    for found in run_world(2, ranks):
        for name, (differences, gathers) in found["products"].items():
            assert max(differences) < 1e-12 and gathers == (2 if name == "even" else 0), name
        assert found["unrecorded"] == 2
        assert found["drafts"] == {"fused": 2, "plain": 2, "norms before fc": 2}
