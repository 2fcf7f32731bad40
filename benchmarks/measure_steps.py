"""Whole steps of a base in decoding, for decode_products.py: our kernels, and cuBLAS's products.

A step is all layers and the head, with random weights: fewer copies than layers, but more than the cache holds. Cache
and rotary tables are those of a sequence of `SLOTS` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.decode_products import BASES, HEADS, ROWS

L2 = 128 << 20
"""Bytes of weights that a graph goes through: more than an H200's cache of 50 MB keeps."""
SLOTS = 256
WAYS = ("ours", "cublas")
"""`cublas`: cuBLAS's products, norms with the residual sum and gates in kernels of their own, the same attention."""


def micros(run: Callable[[int], Any], count: int, replays: int = 4) -> float:
    """Microseconds of run(i), the mean of i = 0 .. count - 1 in a CUDA graph: the fastest of some replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    graph.replay()
    best = float("inf")
    for _ in range(replays):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        best = min(best, events[0].elapsed_time(events[1]) * 1e3 / count)
    return best


class Step:
    """A base with random weights.

    Args:
        layers: default: the base's.
    """

    def __init__(
        self, base: str, layers: int | None = None, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layers, H, qkv, mlp, vocabulary = BASES[base]
        self.layers = layers or self.layers
        self.heads, self.kv_heads, D = HEADS[base]
        make = torch.Generator(device).manual_seed(1)

        def draw(*shape: int) -> Tensor:
            """Random values."""
            return torch.randn(*shape, generator=make, device=device, dtype=dtype)

        shapes = [(qkv, H), (H, H), (2 * mlp, H), (H, mlp)]
        copies = min(self.layers, -(-L2 // sum(2 * n * k for n, k in shapes)))
        self.weights = [[draw(n, k).mul_(k**-0.5) for n, k in shapes] for _ in range(copies)]
        slots = (1, SLOTS + max(ROWS), self.kv_heads, D)
        self.caches = [(draw(*slots), draw(*slots)) for _ in range(copies)]
        self.head, self.norm, self.x = draw(vocabulary, H).mul_(H**-0.5), draw(H), draw(max(ROWS), H)
        angles = torch.rand(max(ROWS), D // 2, generator=make, device=device)
        self.tables, self.first = (angles.cos(), angles.sin()), torch.tensor([SLOTS], device=device)

    def _attended(self, qkv: Tensor, i: int) -> Tensor:
        from megatron_spec.ops.kernels.decode import decode_attention

        tables = (self.tables[0][: len(qkv)], self.tables[1][: len(qkv)])
        cache = self.caches[i % len(self.caches)]
        slots = cache[0].shape[1]
        return decode_attention(qkv, tables, cache, self.first, self.heads, self.kv_heads, slots)

    def ours(self, rows: int) -> Tensor:
        """Logits [rows, V], as `base/decode_layers.py` computes them."""
        from megatron_spec.ops.kernels.few_rows import few_rows_product, normed_rows

        x = self.x[:rows]
        for i in range(self.layers):
            qkv, proj, both, down = self.weights[i % len(self.weights)]
            attended = self._attended(few_rows_product(x, (qkv,), None, self.norm, 1e-6), i)
            x = few_rows_product(attended, (proj,), rest_RO=x)
            gated = few_rows_product(x, both.chunk(2), None, self.norm, 1e-6, gated=True)
            x = few_rows_product(gated, (down,), rest_RO=x)
        return few_rows_product(normed_rows(x, self.norm, 1e-6), (self.head,))

    def cublas(self, rows: int) -> Tensor:
        """The same with cuBLAS's products."""
        from megatron_spec.ops.kernels.rows import gated_forward, norm_forward

        def normed(x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
            """(x + more, its norm)."""
            total, out = torch.empty_like(x), torch.empty_like(x)
            norm_forward(x, 1e-6, more, total, first=(self.norm, out))
            return x if more is None else total, out

        x, more = self.x[:rows], None
        for i in range(self.layers):
            qkv, proj, both, down = self.weights[i % len(self.weights)]
            x, out = normed(x, more)
            x, out = normed(x, linear(self._attended(linear(out, qkv), i), proj))
            gate_up = linear(out, both)
            gated = gate_up.new_empty(rows, gate_up.shape[1] // 2)
            gated_forward(gate_up, gated)
            more = linear(gated, down)
        return linear(normed(x, more)[1], self.head)

    def way(self, way: str, rows: int) -> Tensor:
        """Logits in one of `WAYS`."""
        return self.cublas(rows) if way == "cublas" else self.ours(rows)


def line_of(base: str) -> dict[str, Any]:
    """Milliseconds of a step by way and number of rows, and what the ways' logits have in common."""
    step, most = Step(base), max(ROWS)
    found: dict[str, Any] = {"step": base, "rows": ROWS}
    for way in WAYS:
        run = [micros(lambda _, way=way, n=n: step.way(way, n), 1, 8) for n in ROWS]  # type: ignore[misc]
        found[way] = [round(us / 1e3, 3) for us in run]
    expected, other = step.way("ours", most), step.way("cublas", most)
    wide = expected.double()
    found["ours_over_cublas"] = [round(a / b, 3) for a, b in zip(found["ours"], found["cublas"], strict=True)]
    found["same_bits_alone"] = torch.equal(step.way("ours", 1), expected[:1])
    found["distance_to_cublas"] = float((other.double() - wide).norm() / wide.norm())
    found["norm_us"] = [round(micros(lambda _, n=n: _norm(step, n), 100), 2) for n in ROWS]  # type: ignore[misc]
    return found


def _norm(step: Step, rows: int) -> Tensor:
    from megatron_spec.ops.kernels.few_rows import normed_rows

    return normed_rows(step.x[:rows], step.norm, 1e-6)
