"""Every kernel of the attention table against plain masked attention, and the chunks of context parallelism."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import attention, attention_kernels
from megatron_spec.ops.attention import Call, Variant
from megatron_spec.ops.visibility import KVCache, Visibility
from megatron_spec.runtime.context import ContextShard


def documents(B: int, S: int, packed: bool) -> Tensor:
    """Documents of different lengths in every row, and padding at the end."""
    found = torch.zeros(B, S, dtype=torch.int32)
    if packed:
        for b in range(B):
            found[b] = torch.arange(S) // (S // 5 + 3 * b)
    found[:, S - 3 :] = -1
    return found


def plain(q: Tensor, k: Tensor, v: Tensor, mask_B1LS: Tensor) -> tuple[Tensor, Tensor]:
    """Masked attention with materialised scores: (o [B, L, N, D], lse [B, L, N])."""
    n = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)
    scores = torch.einsum("blnd,bsnd->bnls", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask_B1LS, -torch.inf)
    return torch.einsum("bnls,bsnd->blnd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def variable_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """What flash attention documents: per segment, causal with the mask aligned at the last query and key."""
    outs, lses = [], []
    for (a, b), (c, d) in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True):
        L, S = int(b - a), int(d - c)
        assert longest_q >= L and longest_k >= S >= L
        mask = torch.ones(L, S, dtype=torch.bool).tril(S - L)[None, None]
        o, lse = plain(q[None, a:b], k[None, c:d], v[None, c:d], mask)
        outs.append(o[0])
        lses.append(lse[0].t())
    return torch.cat(outs), torch.cat(lses, 1), torch.zeros(1), torch.zeros(1), torch.zeros(0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 4), (3, 4)])
def test_chunks_see_what_the_mask_shows(monkeypatch: pytest.MonkeyPatch, packed: bool, rank: int, size: int) -> None:
    monkeypatch.setattr(attention_kernels, "_flash", variable_length)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    shard, S = ContextShard(group), 48
    documents_BS = documents(2, S, packed)
    torch.manual_seed(0)
    q = torch.randn(2, S, 4, 8)[:, shard.rows(S, "cpu")]
    k, v = torch.randn(2, S, 2, 8), torch.randn(2, S, 2, 8)
    visibility = Visibility(documents_BS, shard)
    o, lse, _ = attention_kernels.chunks(Call(q, k, v, visibility))
    assert visibility.mask_B1SL is not None
    expected, expected_lse = plain(q, k, v, visibility.mask_B1SL)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 4), (3, 4)])
def test_parts_equal_masked_attention(rank: int, size: int) -> None:
    """Values and gradients, with keys of the whole sequence at once, or this rank's own first."""
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    shard, S = ContextShard(group), 48
    visibility = Visibility(torch.zeros(2, S, dtype=torch.int32), shard, single=True)
    torch.manual_seed(0)
    rows = shard.rows(S, "cpu")
    q = torch.randn(2, S, 4, 8, dtype=torch.float64)[:, rows].requires_grad_()
    k, v = (torch.randn(2, S, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert visibility.mask_B1SL is not None
    expected = plain(q, k, v, visibility.mask_B1SL)
    do = torch.randn_like(expected[0])
    grads = torch.autograd.grad(expected[0], (q, k, v), do)
    call = Call(q.detach(), k.detach(), v.detach(), visibility, lse=True)
    assert attention.kernel_of(call).name == "parts"
    o, lse, state = attention._parts(call)
    torch.testing.assert_close((o, lse), expected)
    torch.testing.assert_close(attention._parts_backward(call, do, o, lse, state), grads)
    own = replace(call, k=call.k[:, rows], v=call.v[:, rows])
    torch.testing.assert_close(attention._parts(own, lambda: (call.k, call.v))[:2], (o, lse))


def test_rows_are_partitioned_with_equal_work() -> None:
    S, size = 64, 4
    shards = [ContextShard(SimpleNamespace(rank=lambda r=r: r, size=lambda: size)) for r in range(size)]  # type: ignore[arg-type, misc]
    rows = torch.cat([shard.rows(S, "cpu") for shard in shards])
    assert torch.equal(rows, shards[0].order(S, "cpu")) and rows.sort().values.tolist() == list(range(S))
    keys_seen = [int((shard.rows(S, "cpu") + 1).sum()) for shard in shards]
    assert len(set(keys_seen)) == 1


def test_materialised_scores_with_fewer_queries_than_keys() -> None:
    """The kernel of GPUs in fp32, under context parallelism: values and gradients."""
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    shard, S = ContextShard(group), 24
    visibility = Visibility(documents(2, S, True), shard)
    torch.manual_seed(0)
    q = torch.randn(2, S, 4, 8)[:, shard.rows(S, "cpu")].requires_grad_()
    k, v = torch.randn(2, S, 2, 8, requires_grad=True), torch.randn(2, S, 2, 8, requires_grad=True)
    assert visibility.mask_B1SL is not None
    o, lse = plain(q, k, v, visibility.mask_B1SL)
    do = torch.randn_like(o)
    call = Call(q, k, v, visibility, lse=True)
    found_o, found_lse, state = attention_kernels.scores(call)
    torch.testing.assert_close((found_o, found_lse), (o, lse))
    found = attention_kernels.scores_backward(call, do, o, lse, state)
    torch.testing.assert_close(found, torch.autograd.grad(o, (q, k, v), do))


def test_mask_of_packed_documents() -> None:
    mask = Visibility(torch.tensor([[0, 0, 1, -1]])).mask_B1SL
    assert mask is not None and mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert Visibility.causal().mask_B1SL is None and Visibility.causal().bias(torch.float32) is None


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernel_equals_materialised_scores(packed: bool, lse: bool) -> None:
    visibility = Visibility(documents(2, 20, True) if packed else None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 8, generator=generator) for heads in (4, 2, 2))
    call = Call(q, k, v, visibility, lse=lse)
    kernel = attention.kernel_of(call)
    assert kernel.name == ("cpu" if lse else "torch")
    found, expected = kernel.forward(call), attention.SCORES.forward(call)
    torch.testing.assert_close(found[0], expected[0])
    if lse:
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize(
    ("variant", "name"),
    [(Variant(window=3), "torch"), (Variant(scale=0.3), "torch"), (Variant(sinks_N=torch.tensor([0.5, -1])), "scores")],
)
def test_variants_over_a_cache(variant: Variant, name: str) -> None:
    """Windows count visible keys; a sink takes its share of the softmax and gives nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, heads, 4, generator=generator) for heads in (2, 1, 1))
    cache = KVCache(1, 1, 8, 1, 4, torch.float32, "cpu")
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    visible = torch.tensor([[[1, 1, 1, 0, 1, 1]]]).bool()
    visibility = Visibility.cached(cache, torch.tensor([[5]]), visible)
    found = attention.attend(q, k, v, visibility, 0, variant)
    assert attention.kernel_of(Call(q, k, v, visibility, variant)).name == name
    assert torch.equal(cache.keys[0, :, 5], k[0])
    seen = [2, 4, 5] if variant.window else [0, 1, 2, 4, 5]
    scores = (q[0, 0] @ cache.keys[0, 0, seen, 0].t()) * (variant.scale or 0.5)
    if variant.sinks_N is not None:
        scores = torch.cat([scores, variant.sinks_N[:, None]], 1)
    expected = scores.softmax(-1)[:, : len(seen)] @ cache.values[0, 0, seen, 0]
    torch.testing.assert_close(found.view(2, 4), expected)
