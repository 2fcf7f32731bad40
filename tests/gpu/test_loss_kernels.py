"""The kernels over vocabulary rows against the reference losses in fp64 and autograd: whole, in two shards, teacher;
and the losses of block drafts and of EAGLE-3 with D-PACE over the kernels against the plain ones in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import ObjectiveConfig, presets
from megatron_spec.config.machine import Machine
from megatron_spec.drafts import block_losses
from megatron_spec.drafts.anchors import BlockPlan
from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.drafts.unroll import Supervision, head_losses
from megatron_spec.losses import reference
from megatron_spec.losses.vocab_parallel import Teacher
from megatron_spec.ops import head, plain
from megatron_spec.planning.paths import NO_PATHS, PATHS, Paths, Setting
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS
from tests.unit_tests.drafts.plain_eagle3 import conversations
from tests.unit_tests.drafts.test_blocks import batch, block_config

pytestmark = MARKS

R, U, D, V, TEMPERATURE = 5, 3, 5000, 9001, 0.7
"""Vocabularies of more than one block of a kernel."""


def draw(*shape: int) -> Tensor:
    """Normal numbers, another draw for another shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).mul(3).to(DEVICE)


def example() -> dict[str, Tensor]:
    teacher = draw(U, D)
    rows, weight = torch.tensor([2, 0, 1, 1, 2], device=DEVICE), torch.rand(R, device=DEVICE) + 0.1
    lse = (teacher.double() / TEMPERATURE).logsumexp(1).float()
    return {"logits": draw(R, D), "teacher": teacher, "lse": lse, "rows": rows, "weight": weight}


def exact(x: dict[str, Tensor], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, overlap, gradient of the weighted loss) in fp64."""
    z, t = x["logits"].double().requires_grad_(), x["teacher"].double()[x["rows"]]
    loss = reference.row_loss(kind, t, z, torch.zeros(R, dtype=torch.int64, device=DEVICE), TEMPERATURE)
    (loss * x["weight"]).sum().backward()
    logp, logq = (t / TEMPERATURE).log_softmax(-1), (z / TEMPERATURE).log_softmax(-1)
    assert z.grad is not None
    return loss.detach(), reference.overlap(logp, logq).detach(), z.grad


@pytest.mark.parametrize("kind", ["soft_ce", "kl"])
def test_whole_rows(kind: str) -> None:
    from megatron_spec.ops.kernels import loss as kernels

    x = example()
    best = x["logits"].argmax(1)
    loss, overlap, gradient = exact(x, kind)
    found = kernels.soft_rows(x["logits"], x["teacher"], x["lse"], x["rows"], x["weight"], TEMPERATURE, kind == "kl")
    torch.testing.assert_close(found[0].double(), loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), overlap, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[2], best)
    torch.testing.assert_close(x["logits"].double(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["soft_ce", "kl"])
def test_two_shards(kind: str) -> None:
    """The same from two halves of the vocabulary, which agree on a row's log-sum-exp in between."""
    from megatron_spec.ops.kernels import loss as kernels

    x = example()
    loss, overlap, gradient = exact(x, kind)
    shards = [part.contiguous() for part in x["logits"].split([3000, 2000], 1)]
    tops, lses, places = zip(*(kernels.largest(shard, TEMPERATURE) for shard in shards), strict=True)
    chosen = torch.where(tops[0] >= tops[1], places[0], places[1] + 3000)
    assert torch.equal(chosen, x["logits"].argmax(1))
    lse = torch.stack(lses).logsumexp(0)
    parts = [
        kernels.soft_shard(shard, t.contiguous(), x["lse"], x["rows"], x["weight"], lse, TEMPERATURE, kind == "kl")
        for shard, t in zip(shards, x["teacher"].split([3000, 2000], 1), strict=True)
    ]
    torch.testing.assert_close((parts[0][0] + parts[1][0]).double(), loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((parts[0][1] + parts[1][1]).double(), overlap, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(shards, 1).double(), gradient, rtol=1e-3, atol=1e-6)


MIXED = [(1.0, 0.0), (0.1, 0.9), (0.0, 0.5)]
"""Weights of the cross-entropy to a label and of sum |q - p|: hard_ce, DSpark's, tv."""
COLUMN = (4999, 7, 3100)
"""Labels of the teacher rows: the last column, the first block, another block."""


def exact_mixed(x: dict[str, Tensor], a: float, b: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, overlap, gradient of the weighted loss) in fp64."""
    z, t = x["logits"].double().requires_grad_(), x["teacher"].double()[x["rows"]]
    logp, logq = (t / TEMPERATURE).log_softmax(-1), (z / TEMPERATURE).log_softmax(-1)
    label = torch.tensor(COLUMN, device=DEVICE)[x["rows"]]
    loss = -a * logq.gather(1, label[:, None])[:, 0] + b * (logq.exp() - logp.exp()).abs().sum(1)
    (loss * x["weight"]).sum().backward()
    assert z.grad is not None
    return loss.detach(), reference.overlap(logp, logq).detach(), z.grad


@pytest.mark.parametrize(("a", "b"), MIXED)
def test_mixed_rows(a: float, b: float) -> None:
    from megatron_spec.ops.kernels import loss as kernels

    x, column = example(), torch.tensor(COLUMN, device=DEVICE)
    best = x["logits"].argmax(1)
    loss, overlap, gradient = exact_mixed(x, a, b)
    told = (x["teacher"], x["lse"], x["rows"], column)
    found = kernels.mixed_rows(x["logits"], *told, x["weight"], TEMPERATURE, (a, b))
    torch.testing.assert_close(found[0].double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), overlap, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[2], best)
    torch.testing.assert_close(x["logits"].double(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("a", "b"), MIXED)
def test_mixed_rows_of_two_shards(a: float, b: float) -> None:
    """A label belongs to one of the shards."""
    from megatron_spec.ops.kernels import loss as kernels

    x, column = example(), torch.tensor(COLUMN, device=DEVICE)
    loss, overlap, gradient = exact_mixed(x, a, b)
    shards = [part.contiguous() for part in x["logits"].split([3000, 2000], 1)]
    lse = torch.stack([kernels.largest(shard, TEMPERATURE)[1] for shard in shards]).logsumexp(0)
    told = [
        (t.contiguous(), x["lse"], x["rows"], column - first)
        for t, first in zip(x["teacher"].split([3000, 2000], 1), (0, 3000), strict=True)
    ]
    sums = [kernels.mixed_sums(z, *t, lse, TEMPERATURE) for z, t in zip(shards, told, strict=True)]
    label, found, mass = (sum(s) for s in zip(*sums, strict=True))
    for z, t in zip(shards, told, strict=True):
        kernels.mixed_gradient(z, *t, x["weight"], lse, mass, TEMPERATURE, (a, b))
    torch.testing.assert_close((2 * b * (1 - found) - a * label).double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), overlap, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(shards, 1).double(), gradient, rtol=1e-3, atol=1e-6)


Result = Callable[[str, torch.dtype, Paths], dict[str, Tensor]]


def with_the_kernel_alone(result: Result, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss kernel in fp32, all else plain, against the plain code in fp64; in several chunks of rows."""
    from megatron_spec.ops.kernels import loss as kernels

    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 4 * 17 * D, "cuda": 4 * 17 * D})
    expected = result(name, torch.float64, NO_PATHS)
    operators = {n: getattr(kernels, n, getattr(plain, n)) for n in plain.OPERATORS}
    monkeypatch.setattr(block_losses.backend, "load", lambda _: SimpleNamespace(**operators))
    others = tuple(n for n in PATHS if n != "loss_kernel")
    found = result(name, torch.float32, Paths(Setting(Machine(kernels="plain"), off=others)))
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


def errors_in_bf16(result: Result, name: str, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Relative errors against the plain code in fp64; without `correct_T`, which depends on ties."""
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cuda": 2 * 17 * D})
    expected, found = result(name, torch.float64, NO_PATHS), result(name, torch.bfloat16, paths)
    wanted = expected.keys() - {"correct_T"}
    return {n: float((found[n] - expected[n]).norm() / expected[n].norm()) for n in wanted}


def sums_and_gradients(losses: DraftLosses, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses, metrics and, after the backward, gradients of the leaves in fp64."""
    losses.total.backward()
    stats = {n: getattr(losses, n).detach() for n in ("total", "loss_T", "correct_T", "overlap_T")}
    return {n: t.double() for n, t in (stats | {n: t.grad for n, t in x.items() if t.grad is not None}).items()}


def teacher_of(U: int, dtype: torch.dtype, temperature: float, inside_U: Tensor | None = None) -> Teacher:
    """A teacher with the same bf16-representable logits in every dtype."""
    z = draw(U, D).bfloat16().to(dtype)
    wide, best = z.to(torch.promote_types(dtype, torch.float32)) / temperature, z.argmax(1)
    return Teacher(z, wide.logsumexp(1), best, best, best >= 0 if inside_U is None else inside_U)


BLOCKS: dict[str, dict[str, Any]] = {
    "ce_l1": {},
    "ce_l1, d-pace, curriculum": {"block_weights": "d-pace", "backbone_weight": 0.4, "temperature": 0.8},
    "hard_ce": {"loss": "hard_ce"},
    "kl": {"loss": "kl"},
}


def block_result(name: str, dtype: torch.dtype, paths: Paths) -> dict[str, Tensor]:
    """Losses, metrics and gradients of DSpark's heads, from random states, in several chunks of rows."""
    config = block_config(algorithm="dspark", markov_rank=16)
    goal = presets.objective_for(config, ObjectiveConfig(**BLOCKS[name]))
    torch.manual_seed(11)
    rows = batch()
    plan = BlockPlan.of(rows, config, goal.anchors)._to(torch.device(DEVICE))
    counts, U = [len(r) for r in plan.supervision.rows], len(plan.supervision.teacher_U)
    shapes = {"states": (sum(counts), 32), "head": (D, 32), "low": (sum(counts), 16), "low_head": (D, 16)}
    # exact in every dtype, also in half precision
    x = {n: draw(*shape).div(4).bfloat16().to(dtype).requires_grad_(n != "head") for n, shape in shapes.items()}
    x["confidence"] = draw(sum(counts)).bfloat16().to(dtype).requires_grad_()
    teacher = teacher_of(U, dtype, goal.temperature)
    heads = block_losses.BlockHead(list(x["states"].split(counts)), x["head"], x["low"], x["low_head"], x["confidence"])
    losses = block_losses.block_losses(heads, plan, teacher, goal, None, paths)  # type: ignore[arg-type]
    return sums_and_gradients(losses, x)


@pytest.mark.parametrize("name", list(BLOCKS))
def test_losses_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_the_kernel_alone(block_result, name, monkeypatch)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies the bits of bfloat16")
@pytest.mark.parametrize("name", list(BLOCKS))
def test_losses_of_blocks_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths of a GPU; probabilities are of logits in bf16."""
    paths = Paths(Setting(Machine(True, (9, 0), "triton"), "bfloat16"))
    assert paths.under(presets.objective_for(block_config(algorithm="dspark"), ObjectiveConfig(**BLOCKS[name]))).on(
        "loss_kernel"
    )
    for n, error in errors_in_bf16(block_result, name, paths, monkeypatch).items():
        assert error < 2e-2, (n, error)


PACED: dict[str, dict[str, Any]] = {
    "soft_ce": {},
    "kl, all rows": {"loss": "kl", "in_vocab_only": False, "temperature": 0.8},
    "tv, paper": {"loss": "tv", "alignment": "paper", "pace_alpha": 0.1},
    "hard_ce, target": {"loss": "hard_ce", "alignment": "target"},
}


def paced_result(name: str, dtype: torch.dtype, paths: Paths) -> dict[str, Tensor]:
    """Losses, metrics and gradients of four paced steps, from random states, in several chunks of rows."""
    goal = ObjectiveConfig(ttt_steps=4, step_weights="d-pace", **PACED[name])
    plan = Supervision.of(conversations(), goal.ttt_steps, goal.alignment)._to(torch.device(DEVICE))
    counts, U = [len(r) for r in plan.rows], len(plan.teacher_U)
    x = {n: draw(*shape).div(4).bfloat16() for n, shape in {"states": (sum(counts), 32), "head": (D, 32)}.items()}
    x = {n: t.to(dtype).requires_grad_() for n, t in x.items()}
    teacher = teacher_of(U, dtype, goal.temperature, torch.arange(U, device=DEVICE) % 4 != 2)
    losses = head_losses(list(x["states"].split(counts)), x["head"], plan, teacher, goal, None, paths=paths)  # type: ignore[arg-type]
    return sums_and_gradients(losses, x)


@pytest.mark.parametrize("name", list(PACED))
def test_paced_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_the_kernel_alone(paced_result, name, monkeypatch)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies the bits of bfloat16")
@pytest.mark.parametrize("name", list(PACED))
def test_paced_steps_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths of a GPU; probabilities are of logits in bf16."""
    paths = Paths(Setting(Machine(True, (9, 0), "triton"), "bfloat16"))
    for n, error in errors_in_bf16(paced_result, name, paths, monkeypatch).items():
        # tv is weighed by probabilities: 0.030 on an H200 for the head, whose gradient sums over rows.
        assert error < (4e-2 if name.startswith("tv") else 2e-2), (n, error)


def test_teacher_of_a_reduced_vocabulary() -> None:
    from megatron_spec.ops.kernels import teacher as kernels

    whole, ids = draw(R, V), torch.arange(1, V, 2, device=DEVICE)[:4400]  # two blocks of draft ids, some tokens apart
    draft_ids = torch.full((V,), -1, dtype=torch.int64, device=DEVICE)
    draft_ids[ids] = torch.arange(len(ids), device=DEVICE)
    whole[0, 0], whole[1, ids[4300]] = 40.0, 40.0  # one token outside of the draft's vocabulary is the best, one inside
    logits = torch.zeros(R, len(ids), device=DEVICE)
    lse, argmax, label, inside = kernels.teacher_rows(whole, ids, draft_ids, TEMPERATURE, logits)
    assert torch.equal(logits, whole[:, ids]) and torch.equal(argmax, whole.argmax(1))
    torch.testing.assert_close(lse.double(), (logits.double() / TEMPERATURE).logsumexp(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(inside, draft_ids[whole.argmax(1)] >= 0)
    assert inside[:2].tolist() == [False, True]
    assert int(label[1]) == 4300 and int(label[0]) == int(logits[0].argmax())
