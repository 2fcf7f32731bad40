"""The kernels of decoding against their plain twins, for heads, trees and lengths of all kinds.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernels themselves on the CPU (as CI does).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import plain
from megatron_spec.ops.tiles import SHARED_MEMORY, Tiles
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
        assert not decode.counters(torch.zeros(1, device=DEVICE).device).any()


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
    if DEVICE == "cuda":
        assert torch.equal(together, apart)
    else:  # the interpreter's products are NumPy's, whose bits depend on the number of rows on some processors
        torch.testing.assert_close(together, apart)
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_division(tree: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program per part or one for all, however many slots are read: the same bits, and near to fp64."""
    from megatron_spec.ops.kernels import decode

    if dtype == torch.bfloat16 and DEVICE != "cuda":
        pytest.skip("bfloat16 products need a GPU")
    (N, G, D), S, slots = (3, 1, 16), 3, 8500
    first = torch.tensor([8190, 2558, 0], device=DEVICE)
    B, draw = len(first), make(9)
    x, angles = draw(S * B, (N + 2 * G) * D).to(dtype), draw(S * B, D // 2)
    keys, values = (draw(B, slots, G, D).to(dtype) for _ in range(2))
    above = torch.eye(S, dtype=torch.bool, device=DEVICE).expand(B, S, S) if tree else None

    def run(module: Any, processors: int, read: int, kind: torch.dtype) -> Tensor:
        monkeypatch.setattr(decode, "_processors", lambda device: processors)
        cache = (keys.to(kind, copy=True), values.to(kind, copy=True))
        tables = (
            (angles.cos().to(kind), angles.sin().to(kind)) if kind == torch.float64 else (angles.cos(), angles.sin())
        )
        found: Tensor = module.decode_attention(x.to(kind), tables, cache, first, N, G, read, above_BSM=above)
        return found

    expected = run(decode, 1, slots, dtype)
    for processors, read in ((1000, slots), (1000, 8200), (1, 8200)):
        assert torch.equal(run(decode, processors, read, dtype), expected)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(expected.double(), run(plain, 1, slots, torch.float64), rtol=bound, atol=bound)


def test_parts_of_a_sequence() -> None:
    """They begin where `LEVELS` says, on the host and in kernels."""
    import triton
    import triton.language as tl

    from megatron_spec.ops.kernels import decode

    begins, (*edges, _) = [], [*(begin for begin, _ in decode.LEVELS[1:]), 0]
    for (begin, size), end in zip(decode.LEVELS, [*edges, 100_000], strict=True):
        begins += range(begin, end, size)
    slots = [n for begin in begins for n in (begin, begin + 1, begin + 127)]
    assert all(begin % decode.SLOTS == 0 for begin in begins)
    assert [decode.parts_of(n + 1) - 1 for n in slots] == [i for i in range(len(begins)) for _ in range(3)]
    begin_of, part_at = decode._begin_of, decode._part_at

    @triton.jit
    def kernel(slot_ptr, part_ptr, begin_ptr, COUNT: tl.constexpr, BEGIN_OF: tl.constexpr, PART_AT: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, COUNT)
        part = PART_AT(tl.load(slot_ptr + i))
        tl.store(part_ptr + i, part)
        tl.store(begin_ptr + i, BEGIN_OF(part))

    count = triton.next_power_of_2(len(slots))
    slot = torch.tensor(slots + [0] * (count - len(slots)), dtype=torch.int32, device=DEVICE)
    part, begin = torch.empty_like(slot), torch.empty_like(slot)
    kernel[(1,)](slot, part, begin, count, begin_of, part_at)
    assert part.tolist()[: len(slots)] == [i for i in range(len(begins)) for _ in range(3)]
    assert begin.tolist()[: len(slots)] == [n for n in begins for _ in range(3)]


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
    assert not decode.counters(x.device).any()
    torch.testing.assert_close(run(decode, [150, 140], 256), run(plain, [150, 140], 256), rtol=2e-5, atol=2e-5)


WAYS = ["", "bias", "norm", "norm, bias", "gated", "norm, gated, bias", "rest", "bias, rest"]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("sizes", [(896, 112), (2100, 40)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("weights", "parts"), [(1, 1), (1, 2), (1, 5), (3, 1), (3, 3)])
def test_products(rows: int, sizes: tuple[int, int], way: str, weights: int, parts: int) -> None:
    """One weight, or several side by side, and then with two inputs that have norms of their own."""
    from megatron_spec.ops.kernels import decode, few_rows

    H, outputs = sizes
    gated = "gated" in way
    wide = H if weights == 1 or gated else H + 96
    draw = make(3)
    shares = [outputs] * 2 if gated else [*(16 * i for i in range(1, weights)), outputs]
    x, given = draw(rows, H), [draw(n, wide) * H**-0.5 for n in shares]
    biases, norm, rest = [draw(n) for n in shares] if "bias" in way else None, draw(H), draw(rows, sum(shares))
    second = (draw(rows, 96), draw(96) if "norm" in way else None) if wide > H else None

    def run(module: Any, **tiles: Any) -> Tensor:
        found: Tensor = module.few_rows_product(
            x, given, biases, norm if "norm" in way else None, 0.1, gated, rest if "rest" in way else None, second,
            **tiles,
        )  # fmt: skip
        return found

    tiles = Tiles(block=128 if parts > 1 else 256, parts=parts, stages=4)
    assert tiles.shared_memory(gated, x.element_size()) <= SHARED_MEMORY
    torch.testing.assert_close(run(few_rows, tiles=tiles), run(plain), rtol=2e-5, atol=2e-5)
    assert not decode.counters(x.device).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize(("H", "H2"), [(896, 0), (4096, 576), (100, 896)])
def test_norms_before_products(H: int, H2: int, dtype: torch.dtype) -> None:
    """Rows of one input or two, rounded once; a row has the same bits alone; an input without a norm is copied."""
    from megatron_spec.ops.kernels import few_rows

    draw = make(4)
    x, norm = draw(5, H).to(dtype), draw(H).to(dtype)
    x2, norm2 = draw(5, H2).to(dtype), draw(H2).to(dtype)

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        wide = rows.double()
        return (wide * (wide.square().mean(1, keepdim=True) + 0.1).rsqrt() * weight.double()).to(dtype)

    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]  # one unit in the last place
    found = few_rows.normed_rows(x, norm, 0.1, (x2, norm2) if H2 else None)
    torch.testing.assert_close(found[:, :H], normed(x, norm), rtol=bound, atol=1e-6)
    second = (x2[2:3].contiguous(), norm2) if H2 else None
    assert torch.equal(few_rows.normed_rows(x[2:3].contiguous(), norm, 0.1, second), found[2:3])
    if H2:
        torch.testing.assert_close(found[:, H:], normed(x2, norm2), rtol=bound, atol=1e-6)
        assert torch.equal(few_rows.normed_rows(x, norm, 0.1, (x2, None))[:, H:], x2)


SHAPES_OF_PRODUCTS = [
    (1152, 896), (896, 4864), (576, 576), (576, 1536), (6144, 4096), (4096, 4096), (4096, 14336), (14336, 4096),
    (151936, 896),
]  # fmt: skip
"""(outputs, inputs): of Qwen2.5 0.5B, SmolLM2 135M, Llama 8B, and a head."""


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES_OF_PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.float16, torch.bfloat16] if DEVICE == "cuda" else [])])
def test_products_of_rows_do_not_depend_on_one_another(
    gated: bool, norm: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """A row alone has the bits that it has among five and among sixteen, and bf16 is as near to fp64 as bf16 can be."""
    from megatron_spec.ops.kernels import few_rows

    (outputs, inputs), draw = shape, make(6)
    if DEVICE != "cuda":
        outputs = min(outputs, 48)  # the interpreter is slow
    x, norms = draw(16, inputs).to(dtype), draw(inputs).to(dtype) if norm else None
    weights = [(draw(outputs, inputs) * inputs**-0.5).to(dtype) for _ in range(1 + gated)]

    def run(rows: Tensor) -> Tensor:
        return few_rows.few_rows_product(rows, weights, None, norms, 0.1, gated)

    together = run(x)
    assert torch.equal(run(x[:5]), together[:5])
    assert torch.equal(torch.cat([run(row[None]) for row in x[:3]]), together[:3])
    exact = plain.few_rows_product(
        x.double(), [w.double() for w in weights], None, None if norms is None else norms.double(), 0.1, gated
    )
    bound = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(together.double(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("rows", [1, 5])
def test_steps_that_the_benchmark_compares(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels and cuBLAS's products compute the same logits, from the same weights and cache."""
    from benchmarks import measure_steps

    monkeypatch.setitem(measure_steps.BASES, "small", (2, 64, 128, 96, 80))
    monkeypatch.setitem(measure_steps.HEADS, "small", (4, 2, 16))
    step = measure_steps.Step("small", device=DEVICE, dtype=torch.float32)
    torch.testing.assert_close(step.way("ours", rows), step.way("cublas", rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.way("ours", rows)[:1], step.way("ours", 1), rtol=0, atol=0)


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
