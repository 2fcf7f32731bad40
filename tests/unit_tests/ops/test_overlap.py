"""Sums over ranks that arrive at the last moment give the same bits, and weight gradients are computed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.base import direct as direct_module
from megatron_spec.config import ObjectiveConfig, ParallelConfig
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import eagle3, fused_backward, fused_unroll
from megatron_spec.ops import overlap
from megatron_spec.ops.overlap import RankSums, Wait
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed
from tests.unit_tests.base import test_direct
from tests.unit_tests.drafts.plain_eagle3 import eagle_config
from tests.unit_tests.drafts.test_eagle_parallel import outcome
from tests.worlds import run_world

TP2 = ParallelConfig(tensor_model_parallel_size=2)
STEPS = 3


class LateSums(RankSums):
    """Until a sum is waited for, its memory holds NaN."""

    log: list[str] = []

    def start(self, x: Tensor) -> Wait:
        """See `RankSums.start`."""
        given, done = x.clone(), []
        x.fill_(float("nan"))
        self.log.append("start")

        def wait() -> Tensor:
            if not done:
                self.log.append("wait")
                x.copy_(RankSums.start(self, given)())
                done.append(True)
            return x

        return wait


class SumsFirst(RankSums):
    """Weight gradients are computed when all sums are complete."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.beside_gradients = False


def base_forward(patch: pytest.MonkeyPatch) -> None:
    base = test_direct.make_base(parallel=TP2)
    paths = Paths(Setting(Machine(kernels="plain"), parallel=TP2, base=base.config))
    norm, found = base.core.final_norm.weight, []
    for kind in (RankSums, LateSums):
        patch.setattr(direct_module, "RankSums", kind)
        base.direct = direct_module.DirectForward(base.config, base.core.layers, norm, base.world.tp, paths)
        found.append(test_direct.batch_of(base))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def draft_unroll(group: Any, scattered: bool, patch: pytest.MonkeyPatch) -> list[str]:
    """The fused unroll of a draft, and its gradients; what happened in which order."""
    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=scattered)
    config, found, log = eagle_config(), {}, LateSums.log
    add_product = fused_backward.add_product
    patch.setattr(fused_backward, "add_product", lambda *a: log.append("product") or add_product(*a))
    paths = Paths(Setting(Machine(kernels="plain"), parallel=layout, draft=config))
    for kind in (RankSums, SumsFirst, LateSums):
        log.clear()
        patch.setattr(eagle3, "RankSums", kind)
        found[kind] = outcome(config, ObjectiveConfig(ttt_steps=STEPS), group, scattered, paths)
    for name, x in found[RankSums].items():
        assert torch.equal(x, found[LateSums][name]), name
        torch.testing.assert_close(x, found[SumsFirst][name], rtol=1e-4, atol=1e-6, msg=name)
    return list(log)


def ranks() -> dict[str, list[str]]:
    group, logs = distributed.initialize(TP2).tp, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SMALLEST_PIECE", 3)
        base_forward(patch)
    for scattered in (False, True):
        for rows_below in (0.0, 1.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fused_unroll, "COMPACT_BELOW", rows_below)
                logs[f"sp {scattered}, rows {rows_below}"] = draft_unroll(group, scattered, patch)
    return logs


def expected_backward(scattered: bool) -> str:
    """A step waits for the gradient from the LM head, starts that of the step below, and waits for the step above; the
    sum after gate and up runs beside the product of down, the other one beside those of o, q, k and v. At last the
    products of gate and up, of the embedding half of q, k and v, and the gradient of the embedding's norm."""
    found = "start "
    for k in reversed(range(STEPS)):
        found += "wait " + "start " * (k > 0) + "wait " * (k + 1 < STEPS) + "start product wait start " + "product " * 4
    return found + "product product wait product product product" + " start wait" * (not scattered)


def test_late_sums() -> None:
    for name, log in run_world(2, ranks)[0].items():
        assert log[: 4 * STEPS] == ["start", "wait"] * 2 * STEPS
        assert " ".join(log[4 * STEPS :]) == expected_backward("sp True" in name), name
