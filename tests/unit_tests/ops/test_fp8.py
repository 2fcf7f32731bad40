"""Products in fp8 over the plain twins: an emulation in fp64 from a table of E4M3 values, and the size of errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.losses.vocab_parallel import Teacher, kernel_row_loss
from megatron_spec.ops import head as head_module
from megatron_spec.ops import plain, weight_products
from megatron_spec.ops.head import StepRows, fused_head
from megatron_spec.ops.weight_products import WeightProducts, weight_gradient

R, H, D, U = (9, 6, 0), 16, 48, 8


def e4m3_values() -> Tensor:
    """All finite values, ascending: sign, four exponent bits (bias 7), three mantissa bits."""
    sizes = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    sizes.remove(480.0)  # this pattern is NaN
    return torch.tensor(sorted({-x for x in sizes} | set(sizes)), dtype=torch.float64)


def rounded(x: Tensor) -> Tensor:
    """Every row, its largest magnitude scaled to 448, at the nearest values of the table."""
    table, scale = e4m3_values(), x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    scaled = x / scale
    right = torch.searchsorted(table, scaled.contiguous()).clamp(1, len(table) - 1)
    low, high = table[right - 1], table[right]
    return torch.where(scaled - low < high - scaled, low, high) * scale


def example(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Teacher, list[StepRows]]:
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(r, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for r in R]
    weight = torch.randn(D, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    logits = torch.randn(U, D, generator=generator, dtype=torch.float64).mul(2).to(dtype)
    best = logits.argmax(-1)
    teacher = Teacher(logits, logits.double().logsumexp(-1), best, best, torch.ones(U, dtype=torch.bool))
    steps = []
    for k, r in enumerate(R):
        rows = torch.randint(0, U, (r,), generator=generator)
        steps.append(StepRows(rows, torch.full((r,), 0.8**k, dtype=torch.float64), best[rows]))
    return hidden, weight, teacher, steps


def run(fp8: bool, frozen: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(total, stats, gradients of the hidden states and, last, of the weight)."""
    hidden, weight, teacher, steps = example()
    in_place = kernel_row_loss(teacher, "soft_ce", 1.0, None, plain)
    told = weight.detach() if frozen else weight
    total, stats = fused_head(hidden, told, steps, lambda *_: None, in_place, fp8=plain if fp8 else None)  # type: ignore[arg-type, return-value]
    inputs = hidden if frozen else [*hidden, weight]
    return total.detach(), stats, list(torch.autograd.grad(3 * total, inputs))


def emulated() -> tuple[Tensor, list[Tensor]]:
    hidden, weight, teacher, steps = example()
    x, w = torch.cat(hidden).detach(), weight.detach()
    logits = (rounded(x) @ rounded(w).t()).requires_grad_()
    p = teacher.logits_UD[torch.cat([s.teacher_R for s in steps])].softmax(-1)
    total = (-(p * logits.log_softmax(-1)).sum(-1) * torch.cat([s.weight_R for s in steps])).sum()
    total.backward()
    assert logits.grad is not None
    d = rounded(logits.grad)
    scale = logits.grad.abs().amax(1, keepdim=True) / 448
    return total.detach(), [3 * d @ rounded(w.t()).t(), 3 * (d / scale).t() @ rounded((x * scale).t()).t()]


@pytest.mark.parametrize(("chunk", "at_once"), [(100, 100), (4, 100), (4, 6), (5, 3)])
def test_head_equals_an_emulation(chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller and larger than what the weight gradient collects."""
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", chunk * D * 8)
    monkeypatch.setattr(weight_products, "ROWS_AT_ONCE", at_once)
    total, stats, (*of_rows, of_weight) = run(True)
    wanted, (wanted_rows, wanted_weight) = emulated()
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(torch.cat(of_rows), wanted_rows, rtol=1e-4, atol=1e-6)
    if at_once > sum(R):  # else other rows share the scale of a column
        torch.testing.assert_close(of_weight, wanted_weight, rtol=1e-4, atol=1e-6)
    exact, exact_stats, (*exact_rows, exact_weight) = run(False)
    for found, known in ((total, exact), (torch.cat(of_rows), torch.cat(exact_rows)), (of_weight, exact_weight)):
        assert 1e-5 < distance(found, known) < 0.06
    assert stats.shape == exact_stats.shape and distance(stats[:, 0], exact_stats[:, 0]) < 0.05


def test_weights_come_from_the_logits_in_fp8() -> None:
    hidden, weight, teacher, steps = example()
    order, found = torch.randperm(sum(R), generator=torch.Generator().manual_seed(2)), []

    def weigh(logits_RD: Tensor, rows_R: Tensor, part: slice) -> Tensor:
        found.append(logits_RD.clone())
        return 1.0 + part.start + torch.arange(len(rows_R))

    in_place, chunks = kernel_row_loss(teacher, "soft_ce", 1.0, None, plain), [slice(0, 5), slice(5, sum(R))]
    given = (hidden, weight, steps, lambda *_: None, in_place, None, chunks, plain)
    total, _ = fused_head(*given, order, weigh)  # type: ignore[arg-type]
    logits = rounded(torch.cat(hidden).detach()) @ rounded(weight.detach()).t()
    torch.testing.assert_close(torch.cat(found), logits[order], rtol=1e-6, atol=1e-6)
    p = teacher.logits_UD[torch.cat([s.teacher_R for s in steps])].softmax(-1)
    factor = torch.empty(sum(R), dtype=torch.float64).index_copy_(0, order, 1.0 + torch.arange(sum(R)).double())
    weights = torch.cat([s.weight_R for s in steps]) * factor
    torch.testing.assert_close(total.detach(), (-(p * logits.log_softmax(-1)).sum(-1) * weights).sum())
    told = [StepRows(s.teacher_R, w, s.target_R) for s, w in zip(steps, weights.split(list(R)), strict=True)]
    known, _ = fused_head(hidden, weight, told, lambda *_: None, in_place, fp8=plain)  # type: ignore[arg-type, return-value]
    inputs = [*hidden, weight]
    for a, b in zip(torch.autograd.grad(total, inputs), torch.autograd.grad(known, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_has_no_weight_gradient() -> None:
    _, _, of_rows = run(True, frozen=True)
    assert torch.equal(torch.cat(of_rows), torch.cat(run(True)[2][:-1]))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def rows_like_a_language_model(noise: float, sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the logits, inputs, weight) of a softmax over Zipf's frequencies; the draft's state is the teacher's
    plus noise."""
    generator = torch.Generator().manual_seed(1)
    rows, width, vocab = 256, 64, 4096
    weight = torch.randn(vocab, width, generator=generator) / width**0.5
    bias = -torch.log1p(torch.randperm(vocab, generator=generator).float())
    state = torch.randn(rows, width, generator=generator)
    x = state + noise * torch.randn(rows, width, generator=generator)
    q, p = ((bias + sharp * s @ weight.t()).double().softmax(1) for s in (x, state))
    return (q - p).float().bfloat16(), x.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize(("noise", "sharp"), [(0.7, 3.0), (0.25, 3.0), (0.25, 8.0), (0.02, 3.0)])
def test_errors_of_gradients(noise: float, sharp: float) -> None:
    """3 % whether the draft is near its teacher or far from it: what docs and `ops/weight_products.py` say."""
    d, x, weight = rows_like_a_language_model(noise, sharp)
    gradient = weight_gradient(x, weight, plain)
    gradient.add(plain.quantize(d))
    of_rows = WeightProducts(weight, plain).backward(d)
    for found, exact in ((of_rows, d.double() @ weight.double()), (gradient.result(), d.double().t() @ x.double())):
        assert 0.005 < distance(found, exact) < 0.04
        assert float(torch.cosine_similarity(found.double().flatten(), exact.flatten(), 0)) > 0.999
