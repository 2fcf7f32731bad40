"""The chunks that context parallelism hands to variable-length attention, against the mask they stand for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import context_attention
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
    """Masked attention with scores in memory: (o [B, L, N, D], lse [B, L, N])."""
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
    monkeypatch.setattr(context_attention, "_flash", variable_length)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    shard, S = ContextShard(group), 48
    documents_BS = documents(2, S, packed)
    torch.manual_seed(0)
    q = torch.randn(2, S, 4, 8)[:, shard.rows(S, "cpu")]
    k, v = torch.randn(2, S, 2, 8), torch.randn(2, S, 2, 8)
    o, lse, _ = context_attention.forward(q, k, v, context_attention.chunks_of(documents_BS, shard))
    expected, expected_lse = plain(q, k, v, context_attention.visible(documents_BS, shard))
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_every_row_is_held_once_and_work_is_even() -> None:
    S, size = 64, 4
    shards = [ContextShard(SimpleNamespace(rank=lambda r=r: r, size=lambda: size)) for r in range(size)]  # type: ignore[arg-type, misc]
    rows = torch.cat([shard.rows(S, "cpu") for shard in shards])
    assert torch.equal(rows, shards[0].order(S, "cpu")) and rows.sort().values.tolist() == list(range(S))
    keys_seen = [int((shard.rows(S, "cpu") + 1).sum()) for shard in shards]
    assert len(set(keys_seen)) == 1


def test_the_fallback_of_gpus_in_fp32_has_fewer_queries_than_keys() -> None:
    from megatron_spec.ops.ttt_attention import TrunkLayout, _plain_trunk, _plain_trunk_backward

    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    shard, S = ContextShard(group), 24
    mask = context_attention.visible(documents(2, S, True), shard)
    layout = TrunkLayout(bias_B1SS=context_attention.bias(mask, torch.float32), context=shard)
    torch.manual_seed(0)
    q = torch.randn(2, S, 4, 8)[:, shard.rows(S, "cpu")].requires_grad_()
    k, v = torch.randn(2, S, 2, 8, requires_grad=True), torch.randn(2, S, 2, 8, requires_grad=True)
    o, lse = plain(q, k, v, mask)
    do = torch.randn_like(o)
    found_o, found_lse = _plain_trunk(q, k, v, layout)
    torch.testing.assert_close((found_o, found_lse), (o, lse))
    found = _plain_trunk_backward(do, q, k, v, o, lse, layout)
    torch.testing.assert_close(found, torch.autograd.grad(o, (q, k, v), do))
