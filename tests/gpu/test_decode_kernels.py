"""The kernels of decoding against their plain twins, for heads, trees and lengths of all kinds.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernels themselves on the CPU (as CI does).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import plain
from tests.gpu.test_kernels import make
from tests.gpu.triton_device import DEVICE, MARKS

pytestmark = MARKS

HEADS = [(8, 2, 64), (14, 2, 64), (5, 1, 80), (4, 4, 16), (32, 8, 128)]
"""(query heads, key/value heads, head size): Qwen2.5 0.5B is the second one."""
LENGTH = 200
SHAPES = {
    "one row": ([130], 1, None), "empty cache": ([0], 3, None), "chains": ([7, 64, 150], 5, None),
    "tree": ([7, 64, 130], 5, 5), "level of a tree": ([20, 90, 130], 3, 9), "many rows": ([64, 129], 40, None),
}  # fmt: skip
"""Slots of the first new row of each sequence, new rows, nodes of a tree."""


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", [False, True])
def test_attention(heads: tuple[int, int, int], shape: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, and the cache after it, with the keys of a sequence split over programs or not."""
    from megatron_spec.ops.kernels import decode

    monkeypatch.setattr(decode, "_processors", lambda device: 1000 if split else 1)
    (N, G, D), (first, S, M) = heads, SHAPES[shape]
    B, extras = len(first), heads[0] % 4 == 0

    def run(module: Any) -> list[Tensor]:
        draw = make(1)
        x, angles = draw(S * B, (N + 2 * G) * D), draw(S * B, D // 2)
        whole = [draw(B + 1, LENGTH, G, D) for _ in range(2)]
        bias, norms = (draw((N + 2 * G) * D), (draw(D), draw(D))) if extras else (None, None)
        above = None
        if M is not None:
            above = (draw(B, S, M) > 0) | (
                torch.arange(M - S, M, device=DEVICE)[:S, None] == torch.arange(M, device=DEVICE)
            )
        slots_BS = torch.tensor(first, device=DEVICE)[:, None] + torch.arange(S, device=DEVICE)
        out = module.decode_attention(
            x, (angles.cos(), angles.sin()), (whole[0][:B], whole[1][:B]), slots_BS[:, 0], N, G, LENGTH, bias, norms,
            0.1, above, grouped=not extras,
        )  # fmt: skip
        return [out, *whole]

    for found, expected in zip(run(decode), run(plain), strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=2e-5, atol=2e-5)
    if split:
        assert not decode._counters(torch.zeros(1, device=DEVICE).device).any()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_one_another(
    heads: tuple[int, int, int], split: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification of five rows gives the bits of five steps of one row, over the edges of blocks and parts too."""
    from megatron_spec.ops.kernels import decode

    if dtype == torch.bfloat16 and DEVICE != "cuda":
        pytest.skip("bfloat16 products need a GPU")
    monkeypatch.setattr(decode, "_processors", lambda device: 1000 if split else 1)
    (N, G, D), draw, first, S = heads, make(5), torch.tensor([0, 59, 62, 126, 130], device=DEVICE), 5
    B = len(first)
    x, angles = draw(S, B, (N + 2 * G) * D).to(dtype), draw(S, B, D // 2)
    caches = [[draw(B, LENGTH, G, D).to(dtype) for _ in range(2)]] * 2
    caches[1] = [kept.clone() for kept in caches[0]]

    def run(rows: slice, cache: list[Tensor]) -> Tensor:
        tables = (angles[rows].flatten(0, 1).cos(), angles[rows].flatten(0, 1).sin())
        begin = first + rows.start
        return decode.decode_attention(x[rows].flatten(0, 1), tables, (cache[0], cache[1]), begin, N, G, LENGTH)

    together = run(slice(0, S), caches[0])
    apart = torch.cat([run(slice(s, s + 1), caches[1]) for s in range(S)])
    assert torch.equal(together, apart)
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


def test_what_is_not_read_does_not_matter() -> None:
    """Slots after a sequence's own may hold anything, even NaN."""
    from megatron_spec.ops.kernels import decode

    (N, G, D), draw = (4, 2, 32), make(2)
    x, angles, cache = draw(2, (N + 2 * G) * D), draw(2, D // 2), [draw(2, LENGTH, G, D) for _ in range(2)]
    first, tables = torch.tensor([70, 3], device=DEVICE), (angles.cos(), angles.sin())
    given = (cache[0].clone(), cache[1].clone())
    expected = decode.decode_attention(x, tables, given, first, N, G, LENGTH)
    for kept in cache:
        kept[0, 70:], kept[1, 3:] = float("nan"), float("nan")
    assert torch.equal(decode.decode_attention(x, tables, (cache[0], cache[1]), first, N, G, LENGTH), expected)


def test_sequences_longer_than_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished sequence may stay in a padding row, longer than the running ones: they are right, then and later."""
    from megatron_spec.ops.kernels import decode

    monkeypatch.setattr(decode, "_processors", lambda device: 1000)
    (N, G, D), slots, draw = (4, 2, 32), 700, make(7)
    x, angles = draw(2, (N + 2 * G) * D), draw(2, D // 2)
    tables = (angles.cos(), angles.sin())
    keys, values = (draw(2, slots, G, D) for _ in range(2))

    def run(module: Any, first: list[int], key_slots: int) -> Tensor:
        cache = (keys.clone(), values.clone())
        found: Tensor = module.decode_attention(x, tables, cache, torch.tensor(first, device=DEVICE), N, G, key_slots)
        return found

    torch.testing.assert_close(run(decode, [150, 600], 256)[0], run(plain, [150, 600], 256)[0], rtol=2e-5, atol=2e-5)
    assert not decode._counters(x.device).any()
    torch.testing.assert_close(run(decode, [150, 140], 256), run(plain, [150, 140], 256), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("sizes", [(896, 112), (2100, 40)])
@pytest.mark.parametrize("way", ["", "bias", "norm", "norm, bias", "gated", "norm, gated, bias", "rest", "bias, rest"])
@pytest.mark.parametrize("parts", [1, 3])
def test_products(rows: int, sizes: tuple[int, int], way: str, parts: int) -> None:
    """One weight, or several side by side, and then with two inputs that have norms of their own."""
    from megatron_spec.ops.kernels import decode

    H, outputs = sizes

    def run(module: Any) -> Tensor:
        draw, gated = make(3), "gated" in way
        shares = [16 * i for i in range(1, parts)] + [outputs]
        if gated:
            shares = [outputs] * 2
        x, wide = draw(rows, H), H if parts == 1 or gated else H + 96
        weights, biases = [draw(n, wide) * H**-0.5 for n in shares], [draw(n) for n in shares]
        norm, rest, second = draw(H), draw(rows, sum(shares)), (draw(rows, 96), draw(96) if "norm" in way else None)
        found: Tensor = module.few_rows_product(
            x, weights, biases if "bias" in way else None, norm if "norm" in way else None, 0.1, gated,
            rest if "rest" in way else None, second if wide > H else None,
        )  # fmt: skip
        return found

    torch.testing.assert_close(run(decode), run(plain), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_products_of_rows_do_not_depend_on_one_another(gated: bool) -> None:
    from megatron_spec.ops.kernels import decode

    draw, H = make(6), 896
    x, weights, norm = draw(5, H), [draw(64, H) for _ in range(2)], draw(H)
    together = decode.few_rows_product(x, weights, None, norm, 0.1, gated)
    apart = [decode.few_rows_product(row[None], weights, None, norm, 0.1, gated) for row in x]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("V", [5, 4096, 10001])
def test_sampling(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masses of chunks, and tokens in chunks that begin with impossible ones."""
    from megatron_spec.ops.kernels import sample

    monkeypatch.setattr(plain.sample, "CHUNK", sample.CHUNK)
    rows, draw = 6, make(4)
    logits = draw(rows, V + 3)[:, :V]  # rows may be apart
    logits[:, : V // 4] = float("-inf")
    top = logits.amax(1) / 0.7
    masses = [module.chunk_masses(logits, top, 0.7) for module in (sample, plain)]
    torch.testing.assert_close(*masses, rtol=1e-6, atol=0)
    uniform = torch.linspace(0, 1, rows, dtype=torch.float64, device=DEVICE)
    for chunk in range(masses[0].shape[1]):
        chosen = torch.full((rows,), chunk, device=DEVICE)
        rest = uniform * masses[1][:, chunk]
        found, expected = (module.find_in_chunk(logits, top, 0.7, chosen, rest) for module in (sample, plain))
        assert torch.equal(found[:-1], expected[:-1])  # the last one is at the edge
        assert bool((logits.gather(1, found[:, None]) > -float("inf")).all())


def test_chunks_of_nan_give_one_of_their_tokens() -> None:
    from megatron_spec.ops.kernels import sample

    logits = torch.full((2, 5000), float("nan"), device=DEVICE)
    chunks, rest = (
        torch.tensor([0, 1], device=DEVICE),
        torch.full((2,), float("nan"), dtype=torch.float64, device=DEVICE),
    )
    found = sample.find_in_chunk(logits, logits[:, 0].contiguous(), 1.0, chunks, rest).tolist()
    assert 0 <= found[0] < sample.CHUNK <= found[1] < 5000
