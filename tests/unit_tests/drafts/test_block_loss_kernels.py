"""Losses of block drafts over plain twins of the loss kernels equal the dense reference in fp64 and the plain code in
fp32, in one process and on two tensor parallel ranks. (Kernels: tests/gpu/test_loss_kernels.py.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_spec.config import ObjectiveConfig, presets
from megatron_spec.config.machine import Machine
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.block_losses import block_losses
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops import head, plain
from megatron_spec.planning.paths import NO_PATHS, PATHS, Paths, Setting
from megatron_spec.runtime import platform
from tests.unit_tests.drafts import test_blocks
from tests.unit_tests.drafts.plain_blocks import plain_loss
from tests.unit_tests.drafts.test_blocks import S, alone, block_config, features, made
from tests.worlds import run_world

__all__ = ["alone"]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **test_blocks.CASES,
    "temperature": ({}, {"temperature": 0.7, "loss": "hard_ce"}),
    "dspark, temperature, d-pace": ({"algorithm": "dspark"}, {"temperature": 1.6, "block_weights": "d-pace"}),
    "tv": ({}, {"loss": "tv"}),
    "dspark, hard_ce, curriculum": ({"algorithm": "dspark"}, {"loss": "hard_ce", "backbone_weight": 0.3}),
}


def use_kernel(draft: Any) -> None:
    """Only the loss kernel's plain twin."""
    others = tuple(name for name in PATHS if name != "loss_kernel")
    draft.paths = Paths(Setting(Machine(kernels="plain"), draft=draft.config, off=others))


def result(draft: Any, ends: Any, goal: ObjectiveConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses, metrics and every gradient of one micro-batch."""
    draft.zero_grad()
    torch.manual_seed(11)
    losses = draft(features(dtype), ends, goal)
    (3 * losses.total).backward()
    stats = {n: getattr(losses, n).detach() for n in ("total", "loss_T", "correct_T", "overlap_T", "rows_T")}
    return stats | {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven rows: several, and a remainder."""
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 7 * 4 * test_blocks.V})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that ran."""
    found: list[str] = []
    for name in ("soft_rows", "mixed_rows"):
        inner = getattr(plain, name)
        monkeypatch.setattr(plain, name, lambda *a, n=name, f=inner: found.append(n) or f(*a))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_plain_code_in_fp32(name: str, alone: Any, small_chunks: None, calls: list[str]) -> None:
    config = block_config(**CASES[name][0])
    goal = presets.objective_for(config, ObjectiveConfig(**CASES[name][1]))
    draft, ends = made(config, alone, torch.float32)
    expected = result(draft, ends, goal, torch.float32)
    assert not calls
    use_kernel(draft)
    found = result(draft, ends, goal, torch.float32)
    assert set(calls) == {"soft_rows" if goal.loss_kind in ("soft_ce", "kl") else "mixed_rows"}
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-5, atol=2e-5, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", list(test_blocks.CASES))
def test_equals_the_dense_mask(name: str, alone: Any, small_chunks: None) -> None:
    config = block_config(**CASES[name][0])
    goal = presets.objective_for(config, ObjectiveConfig(**CASES[name][1]))
    draft, ends = made(config, alone)
    use_kernel(draft)
    found = result(draft, ends, goal, torch.float64)
    torch.manual_seed(11)
    anchor_P = BlockPlan.of(features().batch, config, goal.anchors).layout.anchor_P
    anchors = [sorted((anchor_P[anchor_P // S == b] % S).tolist()) for b in range(2)]
    w = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    ids = draft.vocab.target_ids.tolist()
    expected = plain_loss(w, config, goal, features(), anchors, ends.table, ends.head, ids)
    (3 * expected).backward()
    torch.testing.assert_close(found["total"], expected.detach(), rtol=1e-12, atol=1e-12)
    for n in w.keys() & found.keys():
        torch.testing.assert_close(found[n], w[n].grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("weights", ["exponential", "d-pace"])
def test_a_batch_without_any_block(weights: Any, alone: Any) -> None:
    config = block_config(algorithm="dspark")
    draft, ends = made(config, alone)
    use_kernel(draft)
    f = features()
    f.batch.turns_BS.zero_()
    losses = draft(f, ends, presets.objective_for(config, ObjectiveConfig(backbone_weight=0.5, block_weights=weights)))
    losses.total.backward()
    assert not losses.total.detach() and not any(p.grad is not None and p.grad.any() for p in draft.parameters())


class Counts(TorchDispatchMode):
    """Counts multiplications in products with the vocabulary, and the rows of the largest new matrix of V columns."""

    def __init__(self, V: int) -> None:
        super().__init__()
        self.V, self.products, self.rows = V, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            if self.V in (*a.shape, *b.shape):
                self.products += a.shape[0] * a.shape[1] * b.shape[1]
        turned = func.overloadpacket in (torch.ops.aten.t, torch.ops.aten.transpose)
        if not turned and isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == self.V:
            self.rows = max(self.rows, len(out))
        return out


@pytest.mark.parametrize("goal", [{}, {"block_weights": "d-pace", "backbone_weight": 0.4}])
def test_every_row_meets_the_vocabulary_twice(goal: dict[str, Any], alone: Any, small_chunks: None) -> None:
    """Products per row and token: H for the logits and H for their gradient, three of rank r for the Markov head,
    whatever the weights and with the curriculum; and no more rows of logits than a chunk has.
    """
    config = block_config(algorithm="dspark")
    draft, ends = made(config, alone, torch.float32)
    goal = presets.objective_for(config, ObjectiveConfig(**goal))
    torch.manual_seed(11)
    f = features(torch.float32)
    plan = BlockPlan.of(f.batch, config, goal.anchors)
    counts, U = [len(r) for r in plan.supervision.rows], len(plan.supervision.teacher_U)
    states = list(torch.randn(sum(counts), test_blocks.H, requires_grad=True).split(counts))
    heads = draft.block_head(torch.cat(states), ends.head, plan)
    z = torch.randn(U, test_blocks.V)
    teacher = Teacher(z, z.logsumexp(1), z.argmax(1), z.argmax(1), z.argmax(1) >= 0)
    use_kernel(draft)
    for paths, most in ((draft.paths, 1.0), (NO_PATHS, 1.0 if goal.block_weights == "exponential" else 2.4)):
        with Counts(test_blocks.V) as found:
            block_losses(heads, plan, teacher, goal, alone, paths)
        least = sum(counts) * test_blocks.V * (2 * test_blocks.H + 3 * config.markov_rank)
        assert least <= found.products <= most * least and (found.products > least) is (most > 1)
        assert found.rows <= 7


TWO_RANKS = ("causal, kl", "window", "dspark, rnn", "dspark, curriculum")


def two_ranks() -> dict[str, list[dict[str, Tensor]]]:
    """[plain, kernel] of every case on this tensor parallel rank."""
    platform.activate()
    dist.init_process_group("gloo")
    both = dist.new_group([0, 1])
    # By its own shard of 16 or 15 columns, one rank would take 7 or 15 rows at a time and the other 8 or 16.
    head.CHUNK_BYTES = {"cpu": 960}
    found: dict[str, list[dict[str, Tensor]]] = {}
    for name in TWO_RANKS:
        config = block_config(**CASES[name][0])
        goal = presets.objective_for(config, ObjectiveConfig(**CASES[name][1]))
        draft, ends = made(config, both)
        found[name] = [result(draft, ends, goal, torch.float64)]
        use_kernel(draft)
        found[name].append(result(draft, ends, goal, torch.float64))
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(2, two_ranks)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(world: list[dict[str, Any]], name: str) -> None:
    """Loss, metrics and each rank's share of every gradient are those of the plain code."""
    for rank in world:
        expected, found = rank[name]
        for n in expected:
            torch.testing.assert_close(found[n], expected[n], rtol=1e-9, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")
