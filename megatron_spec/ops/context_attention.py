"""Causal attention of a few chunks of queries over the whole sequence of keys: what context parallelism computes.

A chunk sees the keys before its end (inside its document), which variable-length flash attention expresses with
different starts for queries and keys; the causal mask is aligned at the last row of each document.

S whole sequence, L rows of this rank, B micro-batch, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spec.runtime.context import ContextShard

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass
class Chunk:
    """One contiguous piece of queries.

    Attributes:
        first, end: its rows among the rank's L rows.
        keys: int64, rows of the flattened [B * S] keys that it sees.
        starts_q, starts_k: int32 [documents + 1], first row of each document among its queries and keys.
        longest_q, longest_k: rows of the longest document.
    """

    first: int
    end: int
    keys: Tensor
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


def chunks_of(documents_BS: Tensor, shard: ContextShard) -> list[Chunk]:
    """This rank's chunks, for sequences whose rows belong to `documents_BS` (padding: -1)."""
    S = documents_BS.shape[1]
    place_S = torch.arange(S, device=documents_BS.device)
    begins = torch.ones_like(documents_BS, dtype=torch.bool)
    begins[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    first_key_BS = torch.where(begins, place_S, 0).cummax(1).values
    found, at = [], 0
    for a, e in shard.chunks(S):
        cut = begins[:, a:e].clone()
        cut[:, 0] = True
        rows = cut.flatten().nonzero()[:, 0]
        ends = torch.cat([rows[1:], rows.new_tensor([cut.numel()])])
        count_q = ends - rows
        count_k = count_q + (place_S[a:e] - first_key_BS[:, a:e]).flatten()[rows]
        seen = (place_S >= first_key_BS[:, a, None]) & (place_S < e)
        zero = count_q.new_zeros(1)
        found.append(
            Chunk(
                at, at + e - a, seen.flatten().nonzero()[:, 0], torch.cat([zero, count_q.cumsum(0)]).int(),
                torch.cat([zero, count_k.cumsum(0)]).int(), int(count_q.max()), int(count_k.max()),
            )
        )  # fmt: skip
        at += e - a
    return found


def visible(documents_BS: Tensor, shard: ContextShard) -> Tensor:
    """bool [B, 1, L, S]: which keys a row of this rank sees (where flash attention does not run)."""
    S = documents_BS.shape[1]
    rows = shard.rows(S, documents_BS.device)
    causal_LS = rows[:, None] >= torch.arange(S, device=documents_BS.device)
    return ((documents_BS[:, rows, None] == documents_BS[:, None]) & causal_LS)[:, None]


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, chunks: list[Chunk], scale: float | None = None, window: int = -1
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """q [B, L, N, D] over k, v [B, S, G, D]: (o [B, L, N, D], lse [B, L, N], state of the kernel).

    Args:
        scale: of the scores; None: 1/sqrt(D).
        window: rows before its own that a row sees; -1: all.
    """
    options = {"scale": scale} | ({} if window < 0 else {"window_size_left": window, "window_size_right": 0})
    B, _, N, D = q.shape
    outs, lses, rng = [], [], []
    for c in chunks:
        q_c = q[:, c.first : c.end].reshape(-1, N, D)
        k_c, v_c = (x.flatten(0, 1).index_select(0, c.keys) for x in (k, v))
        o, lse, *state, _ = _flash(
            q_c, k_c, v_c, c.starts_q, c.starts_k, c.longest_q, c.longest_k, 0.0, True, False, **options
        )  # fmt: skip
        outs.append(o.reshape(B, -1, N, D))
        lses.append(lse.reshape(N, B, -1).permute(1, 2, 0))
        rng += state
    return torch.cat(outs, 1), torch.cat(lses, 1), tuple(rng)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rng: tuple[Tensor, ...], chunks: list[Chunk]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [B, L, N, D], dk, dv [B, S, G, D]); o and lse may be those of a merged attention."""
    N, D = q.shape[2:]
    dk, dv = (
        torch.zeros_like(k, memory_format=torch.contiguous_format),
        torch.zeros_like(v, memory_format=torch.contiguous_format),
    )
    dqs = []
    per_chunk = len(rng) // len(chunks)
    for i, c in enumerate(chunks):
        part = slice(c.first, c.end)
        do_c, q_c, o_c = (x[:, part].reshape(-1, N, D) for x in (do, q, o))
        lse_c = lse[:, part].permute(2, 0, 1).reshape(N, -1).contiguous()
        k_c, v_c = (x.flatten(0, 1).index_select(0, c.keys) for x in (k, v))
        state = rng[i * per_chunk : (i + 1) * per_chunk]
        dq_c, dk_c, dv_c = _flash_backward(
            do_c, q_c, k_c, v_c, o_c, lse_c, c.starts_q, c.starts_k, c.longest_q, c.longest_k, 0.0, True, *state
        )
        dqs.append(dq_c.reshape(q.shape[0], -1, N, D))
        for total, piece in ((dk, dk_c), (dv, dv_c)):
            total.view(-1, *piece.shape[1:]).index_add_(0, c.keys, piece)
    return torch.cat(dqs, 1), dk, dv
