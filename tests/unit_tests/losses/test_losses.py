"""Row losses and gradients against one-line versions, and at extreme values."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.config import LossKind
from megatron_spec.losses import reference
from megatron_spec.losses.vocab_parallel import Teacher, row_losses

KINDS = [kind for kind in typing.get_args(LossKind) if kind != "ce_l1"]  # of block drafts: test_blocks.py


def teacher_of(logits_UD: Tensor, temperature: float = 1.0) -> Teacher:
    best = logits_UD.argmax(-1)
    wide = logits_UD.to(torch.promote_types(logits_UD.dtype, torch.float32))
    return Teacher(logits_UD, (wide / temperature).logsumexp(-1), best, best, torch.ones_like(best, dtype=torch.bool))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference(kind: Any, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draft = (3 * torch.randn(6, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = teacher_of(3 * torch.randn(4, 11, generator=generator, dtype=torch.float64), temperature)
    rows = torch.tensor([0, 3, 2, 1, 3, 0])
    found = row_losses(draft.detach().clone(), teacher, rows, kind, temperature, None)
    expected = reference.row_loss(kind, teacher.logits_UD[rows], draft, teacher.label_U[rows], temperature)
    torch.testing.assert_close(found.loss_R, expected)
    torch.testing.assert_close(found.grad_RD, torch.autograd.grad(expected.sum(), draft)[0])
    logs = ((x / temperature).log_softmax(-1) for x in (teacher.logits_UD[rows], draft.detach()))
    torch.testing.assert_close(found.overlap_R, reference.overlap(*logs))
    assert torch.equal(found.argmax_R, draft.argmax(-1))


def test_relations() -> None:
    """kl = soft_ce - entropy >= 0; tv = 1 - overlap; lk = -log overlap; all but soft_ce vanish at p = q."""
    generator = torch.Generator().manual_seed(1)
    draft, logits = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    teacher, rows = teacher_of(logits), torch.arange(5)
    loss = {k: row_losses(draft.clone(), teacher, rows, k, 1.0, None) for k in KINDS}
    p = logits.softmax(-1)
    torch.testing.assert_close(loss["kl"].loss_R, loss["soft_ce"].loss_R + (p * p.log()).sum(-1))
    torch.testing.assert_close(loss["tv"].loss_R, 1 - loss["tv"].overlap_R)
    torch.testing.assert_close(loss["lk"].loss_R, -loss["lk"].overlap_R.log())
    for kind in ("kl", "reverse_kl", "tv", "lk", "lk_hybrid"):
        assert (loss[kind].loss_R > 0).all()
        equal = row_losses(logits.clone(), teacher, rows, kind, 1.0, None)
        torch.testing.assert_close(equal.loss_R, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_for_distant_draft_and_teacher(kind: Any) -> None:
    """Probabilities that underflow in fp32; the gradient still pulls towards the teacher's token."""
    draft = torch.tensor([[200.0, -200.0, -200.0]])
    teacher = teacher_of(torch.tensor([[-200.0, 0.0, 200.0]], dtype=torch.bfloat16))
    found = row_losses(draft, teacher, torch.tensor([0]), kind, 1.0, None)
    assert found.loss_R.isfinite().all() and found.grad_RD.isfinite().all() and found.overlap_R.isfinite().all()
    if kind == "lk":
        torch.testing.assert_close(found.loss_R, torch.tensor([400.0]), rtol=0.01, atol=0)
        assert found.grad_RD[0, 0] > 0.3 > -0.3 > found.grad_RD[0, 2]
