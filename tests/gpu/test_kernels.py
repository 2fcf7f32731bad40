"""Every kernel of the fused unroll against the same arithmetic in plain tensors, for shapes of all kinds.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernels themselves on the CPU (as CI does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import backend, plain
from tests.gpu.triton_device import DEVICE, MARKS

pytestmark = MARKS

SEQUENCE, BATCH, STEPS = 5, 2, 4
ROWS = SEQUENCE * BATCH
HEADS = [(8, 2, 64), (9, 3, 64), (14, 2, 64), (10, 10, 16), (24, 8, 128), (6, 2, 96), (5, 1, 80), (96, 8, 128)]
"""(query heads, key/value heads, head size): powers of two, SmolLM2, Qwen2.5 0.5B, without groups, Llama 3.2 3B, ..."""
PLACES = [1, 2, 4, 7, 8]
"""Rows that are left after some were dropped."""


def make(seed: int) -> Callable[..., Tensor]:
    """Normal numbers, the same ones for both sides."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)


def agree(run: Callable[[Any], list[Tensor]], module: Any) -> None:
    """What the kernels of `module` write is what the plain ones write."""
    found, expected = run(module), run(plain)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert bool(e.ne(0).any()), f"result {i} tells nothing"
        torch.testing.assert_close(f.double(), e.double(), rtol=2e-5, atol=2e-5, msg=lambda m, i=i: f"{i}: {m}")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("compact", [False, True])
def test_branches(heads: tuple[int, int, int], compact: bool) -> None:
    """Merged output and log-sum-exp; gradients of queries, and of keys and values, written and added to."""
    from megatron_spec.ops.kernels import branch

    N, G, D = heads
    rows, place = (len(PLACES), torch.tensor(PLACES, device=DEVICE)) if compact else (ROWS, None)

    def run(module: Any) -> list[Tensor]:
        draw = make(0)
        q, do = draw(rows, N * D), draw(rows, N * D)
        k, v = draw(STEPS, rows, G * D), draw(STEPS, rows, G * D)
        o0 = draw(SEQUENCE, BATCH, N, D).transpose(0, 1)  # as flash attention leaves it: any strides over S and B
        lse, dq0 = draw(BATCH, N, SEQUENCE), draw(BATCH, SEQUENCE, N, D)
        out, dq = torch.zeros_like(q), torch.zeros_like(q)
        module.merge_forward(q, o0, lse, k, v, out, place)
        dk, dv = torch.full_like(k, 7.0), torch.full_like(v, 7.0)  # overwritten by the first
        for first in (True, False):
            module.merge_backward(q, out, do, lse, k, v, dq0, dq, dk, dv, first, place)
        return [out, lse, dq, dk, dv]

    agree(run, branch)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("compact", [False, True])
def test_rotary(heads: tuple[int, int, int], compact: bool) -> None:
    """Projection plus that of the embedding -> q, k, v; and their gradients back."""
    kernels = backend.load("triton")
    N, G, D = heads
    rows, place = (len(PLACES), torch.tensor(PLACES, device=DEVICE)) if compact else (ROWS, None)

    def run(module: Any) -> list[Tensor]:
        draw = make(1)
        x, e, angles = draw(rows, (N + 2 * G) * D), draw(ROWS, (N + 2 * G) * D), draw(rows, D // 2)
        tables, back = (angles.cos(), angles.sin()), torch.zeros_like(x)
        q, k, v = (torch.zeros(rows, n * D, device=DEVICE) for n in (N, G, G))
        module.rotary_forward(x, tables, q, k, v, N, G, e, place)
        module.rotary_backward(draw(*q.shape), draw(*k.shape), draw(*v.shape), tables, back, N, G)
        return [q, k, v, back]

    agree(run, kernels)


@pytest.mark.parametrize("heads", [*HEADS, (0, 2, 64)])
def test_rotary_with_norms(heads: tuple[int, int, int]) -> None:
    """Norms of heads in front of the rotation, and their gradients; also of a projection without queries."""
    kernels = backend.load("triton")
    N, G, D = heads

    def run(module: Any) -> list[Tensor]:
        draw = make(6)
        x, angles, norms = draw(ROWS, (N + 2 * G) * D), draw(ROWS, D // 2), (draw(D), draw(D))
        tables, back = (angles.cos(), angles.sin()), torch.zeros_like(x)
        q, k, v = (torch.zeros(ROWS, n * D, device=DEVICE) for n in (N, G, G))
        module.rotary_forward(x, tables, q, k, v, N, G, norms=norms, eps=0.1)
        partial = module.norm_partials(2 * D, x.device)
        grads = (draw(*q.shape), draw(*k.shape), draw(*v.shape))
        module.rotary_backward(*grads, tables, back, N, G, norms=(x, norms, partial), eps=0.1)
        sums = partial.sum(0).split(D)
        return [k, v, back, sums[1], *([q, sums[0]] if N else [])]

    agree(run, kernels)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_of_a_projection_by_groups(heads: tuple[int, int, int], normed: bool) -> None:
    """Columns in the order of megatron-core's linear_qkv give what they give in the other order; norms of heads."""
    kernels = backend.load("triton")
    N, G, D = heads
    draw = make(2)
    grouped, angles = draw(ROWS, G, N // G + 2, D), draw(ROWS, D // 2)
    tables = (angles.cos(), angles.sin())
    q, k, v = grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]
    norms, eps = ((draw(D), draw(D)), 0.1) if normed else (None, 0.0)
    if norms is not None:
        q, k = (torch.nn.functional.rms_norm(x, (D,), w, eps) for x, w in zip((q, k), norms, strict=True))
    parts = [x.reshape(ROWS, -1) for x in (q, k, v)]
    wanted, found = ([torch.zeros(ROWS, n * D, device=DEVICE) for n in (N, G, G)] for _ in range(2))
    nothing = torch.zeros(ROWS, (N + 2 * G) * D, device=DEVICE)
    plain.rotary_forward(torch.cat(parts, 1), tables, *wanted, N, G, nothing)
    kernels.rotary_forward(
        grouped.flatten(1), tables, found[0], found[1], None, N, G, grouped=True, norms=norms, eps=eps
    )
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("width", [64, 576])
@pytest.mark.parametrize("compact", [False, True])
def test_norms(width: int, compact: bool) -> None:
    """A sum under two norms at once, some rows of the second left out, and backward."""
    from megatron_spec.ops.kernels import rows as kernels

    order = [3, -1, 0, 2, -1, 1, 4, -1, 5, 6] if compact else list(range(ROWS))
    place = torch.tensor(order, dtype=torch.int32, device=DEVICE)

    def run(module: Any) -> list[Tensor]:
        draw = make(3)
        a, b, w1, w2 = draw(ROWS, width), draw(ROWS, width), draw(width), draw(width)
        total, first = torch.zeros_like(a), torch.zeros_like(a)
        second, dx = torch.zeros(max(order) + 1, width, device=DEVICE), torch.zeros_like(a)
        rstd = module.norm_forward(a, 1e-5, b, total, (w1, first), (w2, second), place)
        sums = [module.norm_partials(width, a.device) for _ in range(2)]
        grads = [(draw(*first.shape), w1, sums[0]), (draw(*second.shape), w2, sums[1])]
        module.norm_backward(total, rstd, dx, *grads, place, draw(ROWS, width))
        return [total, first, second, rstd, dx, sums[0].sum(0), sums[1].sum(0)]

    agree(run, kernels)


@pytest.mark.parametrize("width", [48, 1536])
def test_gate(width: int) -> None:
    from megatron_spec.ops.kernels import rows as kernels

    def run(module: Any) -> list[Tensor]:
        draw = make(4)
        x, h = draw(ROWS, 2 * width), torch.zeros(ROWS, width, device=DEVICE)
        module.gated_forward(x, h)
        forward = h.clone()
        module.gated_backward(x, draw(ROWS, width), h)
        return [forward, h, x]

    agree(run, kernels)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("chunks", [False, True])
def test_shifted_sum(compact: bool, chunks: bool) -> None:
    """Gradients of the embedding's projection, from all steps that read it."""
    from megatron_spec.ops.kernels import rows as kernels

    later = len(PLACES) if compact else ROWS
    place = torch.full((ROWS,), -1, dtype=torch.int32, device=DEVICE)
    place[PLACES] = torch.arange(len(PLACES), dtype=torch.int32, device=DEVICE)
    x = make(5)(ROWS + (STEPS - 1) * later, 80)
    places = [place if compact else None]
    if chunks:  # half of the rows are further away, as under context parallelism
        at = torch.arange(ROWS, device=DEVICE)
        at += (at >= ROWS // 2) * (STEPS - 1) * BATCH
        kept = place >= 0 if compact else torch.ones_like(place, dtype=torch.bool)
        positions = [torch.full((int(at[-1]) + 1,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        positions[0][at[kept]] = torch.arange(later, dtype=torch.int32, device=DEVICE)
        positions[1][at] = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
        places = positions
    agree(lambda m: [m.shifted_sum(x, ROWS, later, STEPS, BATCH, *places)], kernels)


@pytest.mark.parametrize("size", [5, 10_000])
def test_adamw(size: int) -> None:
    from megatron_spec.ops.kernels import adam

    generator = torch.Generator().manual_seed(0)
    grad, master, first, second = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(4))
    second.abs_()
    told = (1e-2, (0.9, 0.95), 1e-8, 0.1)
    twin = [x.clone() for x in (master, first, second)]
    out, wanted = (torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    adam.adamw(grad, master, (first, second), out, 0.3, 5, *told)
    plain.adamw(grad, twin[0], (twin[1], twin[2]), wanted, 0.3, 5, *told)
    for a, b in zip((master, first, second), twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=8e-3, atol=1e-6)
