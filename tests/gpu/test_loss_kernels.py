"""The kernels over vocabulary rows against the reference losses in fp64 and autograd: whole, in two shards, teacher."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.losses import reference
from tests.gpu.triton_device import DEVICE, MARKS

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


def test_teacher_of_a_reduced_vocabulary() -> None:
    from megatron_spec.ops.kernels import loss as kernels

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
