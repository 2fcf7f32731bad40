"""Which parts of a step of many sequences give a row the same bits as a verification does.

Attention, norms and gates must. Products of many rows are cuBLAS's, which chooses by the number of rows whether it
divides the inputs among programs (split-K): the share of equal rows, the time and the kernel of each are printed
(pytest -s).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.device_events import kernels_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS = 5
"""Of a verification."""
BATCHES = (24, 64, 96, 128, 192, 240)
SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, head_dim=64,
        vocab_size=151936,
    ),
    "smollm2-135m": dict(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        vocab_size=49152,
    ),
}  # fmt: skip
DIVIDED = {("qwen2.5-0.5b", "down")}
"""Products in which cuBLAS gave a row other bits among 320 rows and more than in a step (CUDA 13.0)."""


def drawn(*shape: int, std: float = 1.0, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * std).bfloat16()


def products(name: str) -> dict[str, Tensor]:
    """Weights [outputs, inputs] of a layer and the head."""
    shape = SHAPES[name]
    H, M, D = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    N, G = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = {
        "qkv": ((N + 2 * G) * D, H), "proj": (H, N * D), "gate, up": (2 * M, H), "down": (H, M),
        "head": (shape["vocab_size"], H),
    }  # fmt: skip
    return {part: drawn(*size, std=size[1] ** -0.5, seed=i) for i, (part, size) in enumerate(sizes.items())}


def equal_rows(run: Callable[[Tensor], Tensor], x: Tensor, batch: int) -> float:
    """Share of the rows (s * batch + b) that are the same computed together and `batch` at a time."""
    together, apart = run(x), torch.cat([run(part) for part in x.split(batch)])
    return (together == apart).flatten(1).all(1).double().mean().item()


def kernel_of(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[str, float]:
    """(names of the kernels, their microseconds)."""
    for _ in range(3):
        run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run(x)
        torch.cuda.synchronize()
    events = kernels_of(profile)
    return " + ".join(e.key[:60] for e in events), sum(e.device_time_total for e in events) / 5


@pytest.mark.parametrize("name", SHAPES)
def test_products(name: str) -> None:
    """Equal rows where cuBLAS does not divide a product, as on an H200; see docs/decoding.md."""
    for part, weight in products(name).items():
        for batch in BATCHES:
            x = drawn(ROWS * batch, weight.shape[1], seed=9)

            def run(rows: Tensor, weight: Tensor = weight) -> Tensor:
                return F.linear(rows, weight)

            share = equal_rows(run, x, batch)
            (one, fast), (many, slow) = kernel_of(run, x[:batch]), kernel_of(run, x)
            print(f"{name}, {part}, {batch} x {ROWS}: {share:.1%} equal, {fast:.1f} and {slow:.1f} us")
            print(f"    {one}\n    {many}")
            assert share == 1.0 or (name, part) in DIVIDED


@pytest.mark.parametrize("name", SHAPES)
def test_norms_and_gates(name: str) -> None:
    from megatron_spec.ops.kernels import rows

    H, M = SHAPES[name]["hidden_size"], SHAPES[name]["intermediate_size"]
    weight = drawn(H, seed=3)

    def norm(x: Tensor) -> Tensor:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        rows.norm_forward(x, 1e-6, x, total, (weight, normed))
        return normed

    def gate(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), M)
        rows.gated_forward(x, out)
        return out

    for batch in BATCHES:
        assert equal_rows(norm, drawn(ROWS * batch, H), batch) == 1.0
        assert equal_rows(gate, drawn(ROWS * batch, 2 * M), batch) == 1.0


@pytest.mark.parametrize("batch", [1, *BATCHES])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name: str, batch: int) -> None:
    """Sequences of 1 to 1500 slots: a verification, steps of one row, steps of half the sequences, and more slots read
    than there are."""
    from megatron_spec.ops.kernels import decode

    shape = SHAPES[name]
    N, G, D = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    X, slots = (N + 2 * G) * D, 2304
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(0, 1500, (batch,), generator=generator).cuda()
    x, bias = drawn(ROWS, batch, X), drawn(X, seed=5) * 8
    angles = (torch.arange(ROWS, device="cuda")[:, None] + first)[..., None] * torch.linspace(1, 1e-4, D // 2).cuda()
    kept = [drawn(batch, slots, G, D, seed=i) for i in (6, 7)]

    def run(rows: slice, read: int, cache: list[Tensor], some: slice = slice(None)) -> Tensor:
        tables = [t[rows, some].flatten(0, 1).contiguous() for t in (angles.cos(), angles.sin())]
        found = decode.decode_attention(
            x[rows, some].flatten(0, 1).contiguous(), (tables[0], tables[1]), (cache[0][some], cache[1][some]),
            first[some] + (rows.start or 0), N, G, read, bias,
        )  # fmt: skip
        return found.unflatten(0, (x[rows].shape[0], -1))

    def fresh() -> list[Tensor]:
        return [t.clone() for t in kept]

    caches = [fresh() for _ in range(4)]
    together = run(slice(None), 1536, caches[0])
    assert torch.equal(run(slice(None), slots, caches[1]), together)
    assert torch.equal(torch.cat([run(slice(s, s + 1), slots, caches[2]) for s in range(ROWS)]), together)
    half = slice(0, max(1, batch // 8))
    assert torch.equal(run(slice(None), 1536, caches[3], half), together[:, half])
    for a, b in zip(caches[0], caches[2], strict=True):
        assert torch.equal(a, b)
