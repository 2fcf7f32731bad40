"""Products of many rows that compute what follows them, against a product and another pass in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_spec.losses.vocab_parallel import Teacher, kernel_row_loss
from megatron_spec.ops import backend
from megatron_spec.ops.head import StepRows, fused_head
from tests.gpu.triton_device import DEVICE, INTERPRETED, MARKS

many_rows: Any = pytest.importorskip("megatron_spec.ops.kernels.many_rows")

pytestmark = MARKS
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16]
"""Triton's interpreter reads tiles of half precision wrongly."""
SHAPES = [(1, 64, 8), (130, 72, 136), (300, 192, 384)] + (
    [] if INTERPRETED else [(4500, 896, 4864), (2048, 4096, 14336)]
)


@pytest.fixture(autouse=True)
def _any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MANY", "MANY_INPUTS"):
        monkeypatch.setattr(many_rows, name, 1)
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the path product_epilogues needs compute capability 9.0")


def draw(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    make = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=make) * scale).to(DEVICE, dtype)


def off(found: Tensor, expected: Tensor) -> float:
    """Relative distance."""
    return float((found.double() - expected).norm() / expected.norm())


def bound(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R,H,M", SHAPES)
def test_gate(R: int, H: int, M: int, dtype: torch.dtype) -> None:
    x, weight = draw(dtype, R, H), draw(dtype, 2 * M, H, scale=H**-0.5)
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    out, kept = x.new_empty(R, M), x.new_empty(R, 2 * M)
    many_rows.gated_product(x, weight, out, kept)
    assert off(out, silu(gate) * up) < bound(dtype) and off(kept, torch.cat([gate, up], 1)) < bound(dtype)
    again = torch.empty_like(out)
    many_rows.gated_product(x, weight, again)
    assert torch.equal(again, out), "whether gate and up are kept changes nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R,H,V", [(R, H, 2 * M) for R, H, M in SHAPES])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_largest(R: int, H: int, V: int, temperature: float, dtype: torch.dtype) -> None:
    x, weight = draw(dtype, R, H), draw(dtype, V, H, scale=H**-0.5)
    weight[[V // 2, V - 1]] = weight[V // 3].clone()  # the first of equal logits counts, in a tile and over tiles
    x[R // 2] = 3 * weight[V // 3] / weight[V // 3].norm() ** 2
    for masses in (True, False):
        out = x.new_empty(R, V)
        top, lse, best = many_rows.largest_product(x, weight, temperature, out, masses)
        assert off(out, x.double() @ weight.double().t()) < bound(dtype)
        stored = out.double() / temperature
        assert torch.equal(stored.gather(1, best[:, None])[:, 0], stored.amax(1)) and best[R // 2] == V // 3
        torch.testing.assert_close(top.double(), stored.amax(1), atol=1e-5, rtol=1e-5)
        if masses:
            torch.testing.assert_close(lse.double(), stored.logsumexp(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [512, 296])
@pytest.mark.parametrize("kind", ["soft_ce", "tv"])
def test_losses(kind: Any, D: int, dtype: torch.dtype) -> None:
    """Of a head whose products find the log-sum-exps: total, sums of two steps and gradients, against another pass."""
    kernels, (H, U, T), counts = backend.load("triton"), (64, 7, 0.7), (130, 5)
    z = draw(dtype, U, D, scale=3.0)
    best = z.argmax(1)
    teacher = Teacher(z, (z.float() / T).logsumexp(1), best, best, best >= 0)

    def run(epilogue: tuple[Any, float] | None) -> list[Tensor]:
        x = [draw(dtype, n, H, scale=0.5).requires_grad_() for n in (*counts, D)]
        rows = [torch.arange(n, device=DEVICE) % U for n in counts]
        steps = [StepRows(r, torch.ones_like(r, dtype=torch.float32), best[r]) for r in rows]
        in_place = kernel_row_loss(teacher, kind, T, None, kernels)
        chunks: Any = [slice(0, 132), slice(132, 135)]
        total, stats = fused_head(x[:2], x[2], steps, pytest.fail, in_place, chunks=chunks, epilogue=epilogue)  # type: ignore[arg-type]
        total.backward()
        return [total.detach(), stats, *(t.grad for t in x)]  # type: ignore[misc]

    for found, expected in zip(run((kernels, T)), run(None), strict=True):
        assert off(found, expected.double()) < (1e-5 if dtype == torch.float32 else 4e-2)


def test_nan_is_not_an_index() -> None:
    """A row of NaN: its log-sum-exp tells, and its index can be read."""
    x, weight = draw(DTYPES[0], 130, 64), draw(DTYPES[0], 512, 64)
    x[129] = float("nan")
    _, lse, best = many_rows.largest_product(x, weight, 1.0, x.new_empty(130, 512))
    assert lse[129].isnan() and not lse[:129].isnan().any() and 0 <= int(best[129]) < 512


@pytest.mark.parametrize("V", [512, 264])
def test_columns_of_minus_infinity(V: int) -> None:
    """Half a tile, and a whole one or its columns: they add nothing to a sum."""
    x, weight = draw(DTYPES[0], 130, 64).abs() + 0.1, draw(DTYPES[0], V, 64)
    weight[128:] = torch.finfo(DTYPES[0]).min
    out = x.new_empty(130, V)
    _, lse, best = many_rows.largest_product(x, weight, 0.7, out)
    assert out[:, 128:].isneginf().all() and torch.equal(best, out.float().argmax(1))
    torch.testing.assert_close(lse.double(), (out.double() / 0.7).logsumexp(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("columns", [8, 12], ids=["aligned", "not aligned"])
def test_few_or_uneven_rows(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tiles do not pay, or rows do not start at multiples of 16 bytes, a product and a pass compute the same."""
    dtype = DTYPES[0]
    if columns % 8 == 0:
        monkeypatch.setattr(many_rows, "MANY", 1000)
    V = 2 * columns + (columns % 8 > 0)
    x, weight = draw(dtype, 40, 64), draw(dtype, V, 64, scale=0.1)
    monkeypatch.setattr(many_rows, "_in_tiles", lambda *_: pytest.fail("not by tiles"))
    for masses in (True, False):
        out = x.new_empty(40, V)
        _, lse, best = many_rows.largest_product(x, weight, 1.0, out, masses)
        torch.testing.assert_close(lse.double(), out.double().logsumexp(1), atol=1e-4, rtol=1e-4)
        assert torch.equal(best, out.float().argmax(1))
    if columns % 8:
        x, weight = draw(dtype, 40, 60), draw(dtype, 2 * columns, 60, scale=0.1)
        weight = torch.cat([weight, weight], 1)[:, 1:61]
    gated = x.new_empty(40, columns)
    many_rows.gated_product(x, weight[: 2 * columns], gated)
    gate, up = (x.double() @ weight[: 2 * columns].double().t()).chunk(2, 1)
    assert off(gated, silu(gate) * up) < 10 * bound(dtype)
