"""The fused head against separate logits, loss and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.losses.vocab_parallel import Teacher, row_losses
from megatron_spec.ops import head as module
from megatron_spec.ops.head import StepRows, fused_head, whole_chunks

R, H, D = (5, 3, 0), 6, 9


def example() -> tuple[list[Tensor], Tensor, Teacher, list[StepRows]]:
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(r, H, generator=generator, dtype=torch.float64).requires_grad_() for r in R]
    weight = torch.randn(D, H, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.randn(8, D, generator=generator, dtype=torch.float64)
    best = logits.argmax(-1)
    teacher = Teacher(logits, logits.logsumexp(-1), best, best, torch.ones(8, dtype=torch.bool))
    steps = []
    for k, r in enumerate(R):
        rows = torch.randperm(8, generator=generator)[:r]
        weights = torch.full((r,), 0.8**k, dtype=torch.float64)
        weights[:1] = 0
        steps.append(StepRows(rows, weights, best[rows]))
    return hidden, weight, teacher, steps


def run(hidden: list[Tensor], weight: Tensor, teacher: Teacher, steps: list[StepRows]) -> tuple[Tensor, Tensor]:
    return fused_head(hidden, weight, steps, lambda x, rows: row_losses(x, teacher, rows, "soft_ce", 1.0, None))


@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_equals_autograd(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller than, not dividing, and larger than the rows; a step without rows."""
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", chunk_rows * D * 4)
    hidden, weight, teacher, steps = example()
    total, stats = run(hidden, weight, teacher, steps)
    expected, rows = torch.zeros((), dtype=torch.float64), []
    for x, step in zip(hidden, steps, strict=True):
        logq, p = (x @ weight.T).log_softmax(-1), teacher.logits_UD[step.teacher_R].softmax(-1)
        loss = -(p * logq).sum(-1)
        expected = expected + (loss * step.weight_R).sum()
        correct = (logq.argmax(-1) == p.argmax(-1)).sum()
        overlap = torch.minimum(p, logq.exp()).sum()
        rows.append([float(x.detach()) for x in (loss[step.weight_R > 0].sum(), correct, overlap)])
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(stats, torch.tensor(rows, dtype=torch.float64))
    inputs = [*hidden, weight]
    for a, b in zip(torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_other_order_and_weights_from_logits(size: int) -> None:
    hidden, weight, teacher, steps = example()
    order = torch.randperm(sum(R), generator=torch.Generator().manual_seed(4))
    seen: list[Tensor] = []

    def weigh(logits_RD: Tensor, rows_R: Tensor, part: slice) -> Tensor:
        """2 ** place times the probability of the teacher's best token."""
        seen.append(order[part])
        return logits_RD.softmax(-1)[range(len(rows_R)), teacher.label_U[rows_R]] * 2.0 ** seen[-1]

    def row_loss(x: Tensor, rows: Tensor):  # type: ignore[no-untyped-def]
        return row_losses(x, teacher, rows, "soft_ce", 1.0, None)

    chunks = module.row_chunks(sum(R), size)
    total, stats = fused_head(hidden, weight, steps, row_loss, chunks=chunks, order_N=order, weigh=weigh)
    assert torch.equal(torch.cat(seen), order)
    rows = torch.cat([s.teacher_R for s in steps])
    logq, p = (torch.cat(hidden) @ weight.T).log_softmax(-1), teacher.logits_UD[rows].softmax(-1)
    factor = logq.detach().exp()[range(len(rows)), teacher.label_U[rows]] * 2.0 ** torch.arange(len(rows))
    expected = (-(p * logq).sum(-1) * torch.cat([s.weight_R for s in steps]) * factor).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(stats, run(hidden, weight, teacher, steps)[1])
    inputs = [*hidden, weight]
    for a, b in zip(torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [3, 40, 500])
def test_chunks_of_whole_groups(size: int) -> None:
    counts = torch.randint(1, 8, (200,), generator=torch.Generator().manual_seed(1))
    ends = {0, *counts.cumsum(0).tolist()}
    chunks = whole_chunks(counts, size)
    assert [c.start for c in chunks[1:]] == [c.stop for c in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].stop) == (0, int(counts.sum()))
    for chunk in chunks:
        assert {chunk.start, chunk.stop} <= ends
        assert chunk.stop - chunk.start <= size or not ends & {*range(chunk.start + 1, chunk.stop)}
    if size == 500:
        assert len(chunks) == 2 and chunks[0].stop % 16 == 0 and chunks[0].stop > size - 100
    assert whole_chunks(counts[:0], size) == []


def test_gradcheck() -> None:
    hidden, weight, teacher, steps = example()
    assert torch.autograd.gradcheck(lambda w, *h: run(list(h), w, teacher, steps)[0], (weight, *hidden))


def test_no_gradient_wanted() -> None:
    """A frozen head, and evaluation without gradients."""
    hidden, weight, teacher, steps = example()
    total, stats = run(hidden, weight.detach(), teacher, steps)
    total.backward()
    assert hidden[0].grad is not None and hidden[0].grad.any()
    with torch.no_grad():
        again, same = run(hidden, weight, teacher, steps)
    assert not again.requires_grad and torch.equal(again, total) and torch.equal(stats, same)


def test_a_row_of_weight_zero_may_have_an_infinite_loss() -> None:
    """It must not turn the sums into NaN."""
    hidden, weight, teacher, steps = example()
    teacher.logits_UD[steps[0].teacher_R[0]] = -torch.inf
    teacher.logits_UD[steps[0].teacher_R[0], 0] = 0
    teacher.lse_U = teacher.logits_UD.logsumexp(-1)
    total, stats = fused_head(hidden, weight, steps, lambda x, rows: row_losses(x, teacher, rows, "kl", 1.0, None))
    total.backward()
    assert total.isfinite() and stats.isfinite().all() and weight.grad is not None and weight.grad.isfinite().all()


def test_low_precision_sums_the_head_gradient_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: the gradient over many small chunks is as accurate as over one."""
    _hidden, weight, teacher, _steps = example()
    rows = torch.arange(8).repeat(64)
    step = StepRows(rows, torch.ones(512), teacher.label_U[rows])
    teacher.logits_UD = teacher.logits_UD.bfloat16()
    teacher.lse_U = teacher.logits_UD.float().logsumexp(-1)
    x = torch.randn(512, H, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    grads = []
    for chunk_rows in (8, 512):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", chunk_rows * D * 4)
        w = weight.detach().bfloat16().requires_grad_()
        run([x], w, teacher, [step])[0].backward()
        assert w.grad is not None and w.grad.dtype == torch.bfloat16
        grads.append(w.grad.float())
    assert (grads[0] - grads[1]).norm() < 4e-3 * grads[1].norm()
