"""Key visibility: which keys each query row of a forward sees. Built once per forward, read by every layer.

S query rows, B batch, G key/value heads, D head size, L key length (under context parallelism: S is this rank's part
of the L rows of the sequence; in decoding: number of cache slots), M tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_spec.batch import Batch
from megatron_spec.runtime.context import ContextShard


class KVCache:
    """Keys and values of every layer for a batch of sequences of different lengths.

    Rollback is free: rows past the accepted length are never visible to a later query, because `Visibility.cached`
    masks by slot, and the next tokens overwrite them.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        value_dim: int | None = None,
    ) -> None:
        shape = (num_layers, batch, max_length, kv_heads)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim or head_dim, dtype=dtype, device=device)

    def places(self, slots_BS: Tensor) -> Tensor:
        """int64 [S * B] indices of `slots_BS` in a layer viewed as [B * max_length, ...]."""
        first_B = torch.arange(slots_BS.shape[0], device=slots_BS.device) * self.keys.shape[2]
        return (slots_BS.t() + first_B).reshape(-1)

    def write(self, layer: int, k_SBGD: Tensor, v_SBGD: Tensor, places_R: Tensor) -> None:
        """Write new rows of a layer at the indices from `places`."""
        for kept, new in ((self.keys[layer], k_SBGD), (self.values[layer], v_SBGD)):
            kept.flatten(0, 1).index_copy_(0, places_R, new.flatten(0, 1))

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, B, G, D] of a layer."""
        return self.keys[layer, :, :length].transpose(0, 1), self.values[layer, :, :length].transpose(0, 1)


@dataclass
class Documents:
    """Packed documents for variable-length attention over the flattened [B * S] rows.

    Attributes:
        starts: int32 [documents + 1], first row of every document, then B * S.
        longest: rows of the longest document.
    """

    starts: Tensor
    longest: int

    @staticmethod
    def of(documents_BS: Tensor) -> Documents:
        """Build from the document index of every row (padding: -1); documents are contiguous."""
        starts = _begins(documents_BS).flatten().nonzero().flatten()
        starts = torch.cat([starts, starts.new_tensor([documents_BS.numel()])])
        return Documents(starts.int(), int(starts.diff().max()))

    @staticmethod
    def whole(B: int, S: int, device: torch.device) -> Documents:
        """Every row of the batch is one document."""
        return Documents(torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device), S)


@dataclass
class Chunk:
    """A contiguous piece of the queries of a context-parallel rank.

    Attributes:
        first, end: range of the rank's rows.
        keys: int64, rows of the flattened [B * L] keys that it sees.
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


def _begins(documents_BS: Tensor) -> Tensor:
    """bool [B, S]: rows that begin a document."""
    first = torch.ones_like(documents_BS, dtype=torch.bool)
    first[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return first


def chunks_of(documents_BL: Tensor, shard: ContextShard) -> list[Chunk]:
    """This rank's chunks, for sequences whose rows belong to `documents_BL` (padding: -1).

    A chunk sees the keys before its end within its document. Variable-length flash attention expresses this by
    different starts for queries and keys; its causal mask is aligned at the last row of each document.
    """
    L = documents_BL.shape[1]
    place_L = torch.arange(L, device=documents_BL.device)
    begins = _begins(documents_BL)
    first_key_BL = torch.where(begins, place_L, 0).cummax(1).values
    found, at = [], 0
    for a, e in shard.chunks(L):
        cut = begins[:, a:e].clone()
        cut[:, 0] = True
        rows = cut.flatten().nonzero()[:, 0]
        ends = torch.cat([rows[1:], rows.new_tensor([cut.numel()])])
        count_q = ends - rows
        count_k = count_q + (place_L[a:e] - first_key_BL[:, a:e]).flatten()[rows]
        seen = (place_L >= first_key_BL[:, a, None]) & (place_L < e)
        zero = count_q.new_zeros(1)
        found.append(
            Chunk(
                at, at + e - a, seen.flatten().nonzero()[:, 0], torch.cat([zero, count_q.cumsum(0)]).int(),
                torch.cat([zero, count_k.cumsum(0)]).int(), int(count_q.max()), int(count_k.max()),
            )
        )  # fmt: skip
        at += e - a
    return found


@dataclass
class Visibility:
    """Visibility: causal, causal within documents, or a mask over cache slots.

    The forms that kernels read (mask, starts of documents, chunks) are computed on first use.

    Attributes:
        documents_BL: document index of every row of the whole sequence (padding: -1), if rows are packed or ranks
            share the sequence; None: causal over all rows.
        context: the ranks that share the sequence: queries are this rank's rows, keys and values those of all ranks.
        single: every sequence is one document (with padding only after it), so rows see all earlier rows.
        cache: keys and values in decoding; None in training.
        slots_BS: int64 cache slots that the S new rows are written to (decoding only); consecutive but for `given_BSL`.
        key_slots: number of cache slots that the new rows may see (decoding only); 0: the new rows start their
            sequences and see each other causally.
        above_BSM: bool, new row s sees node m of a tree, whose nodes are in the last M slots, which end with the last
            new row; None: every slot up to its own.
        given_BSL: bool, which of the first `key_slots` slots each new row sees, instead of both.
        lengths_B: known tokens of each text (decoding only); None: up to the last new row.
    """

    documents_BL: Tensor | None = None
    context: ContextShard | None = None
    single: bool = False
    cache: KVCache | None = None
    slots_BS: Tensor | None = None
    key_slots: int = 0
    above_BSM: Tensor | None = None
    given_BSL: Tensor | None = None
    lengths_B: Tensor | None = None
    _made: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def causal() -> Visibility:
        """Every row sees itself and all earlier rows."""
        return Visibility()

    @staticmethod
    def of(batch: Batch) -> Visibility:
        """Visibility of a training batch: causal within each document."""
        single = batch.single_document  # trailing padding is harmless
        if batch.context is None and single:
            return Visibility()
        return Visibility(batch.documents_BS, batch.context, single)

    @staticmethod
    def prefill(cache: KVCache, slots_BS: Tensor, lengths_B: Tensor | None = None) -> Visibility:
        """Rows that start their sequences: they see each other causally and are written to `slots_BS`."""
        return Visibility(cache=cache, slots_BS=slots_BS, lengths_B=lengths_B)

    @staticmethod
    def cached(
        cache: KVCache, slots_BS: Tensor, visible_BSL: Tensor | None = None, length: int | None = None,
        lengths_B: Tensor | None = None, above_BSM: Tensor | None = None,
    ) -> Visibility:  # fmt: skip
        """New rows are written to `slots_BS` and see every slot up to their own, or what a mask or a tree says.

        Args:
            visible_BSL: a mask over slots.
            length: upper bound of the slots; computed from `slots_BS` (a device synchronisation) when not given.
            above_BSM: nodes of a tree; the new rows are in consecutive slots.
        """
        if length is None:
            length = int(slots_BS.max()) + 1 if visible_BSL is None else visible_BSL.shape[-1]
        return Visibility(
            cache=cache, slots_BS=slots_BS, key_slots=length, above_BSM=above_BSM, given_BSL=visible_BSL,
            lengths_B=lengths_B,
        )  # fmt: skip

    @cached_property
    def visible_BSL(self) -> Tensor | None:
        """bool, which of the first L cache slots each new row sees; None: the new rows begin their sequences."""
        if not self.key_slots or self.given_BSL is not None:
            return self.given_BSL
        assert self.slots_BS is not None
        if self.above_BSM is not None:
            first_B = self.slots_BS[:, -1] + 1 - self.above_BSM.shape[2]
            return visible_slots(first_B, self.above_BSM, self.key_slots)
        return torch.arange(self.key_slots, device=self.slots_BS.device) <= self.slots_BS[:, :, None]

    @property
    def is_causal(self) -> bool:
        """Every row sees all earlier rows of its sequence: no document boundaries, no mask."""
        return self.documents_BL is None and not self.key_slots

    @property
    def is_plain(self) -> bool:
        """Causal over complete sequences on this rank, without a cache."""
        return self.is_causal and self.context is None and self.cache is None

    @cached_property
    def documents(self) -> Documents:
        """Starts of the documents, for variable-length attention."""
        assert self.documents_BL is not None
        return Documents.of(self.documents_BL)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """This rank's chunks of a shared sequence, with the keys they see."""
        assert self.documents_BL is not None and self.context is not None
        return chunks_of(self.documents_BL, self.context)

    @cached_property
    def mask_B1SL(self) -> Tensor | None:
        """bool, True where query row s sees key l; None: causal."""
        if self.visible_BSL is not None:
            return self.visible_BSL[:, None]
        if self.documents_BL is None:
            return None
        documents, L = self.documents_BL, self.documents_BL.shape[1]
        rows = torch.arange(L, device=documents.device)
        mine = rows if self.context is None else self.context.rows(L, documents.device)
        return ((documents[:, mine, None] == documents[:, None]) & (mine[:, None] >= rows))[:, None]

    def bias(self, dtype: torch.dtype, repeat: int = 1) -> Tensor | None:
        """[B, 1, repeat * S, L] mask as 0 and -inf, repeated for each query head of a group; None: causal."""
        if self.mask_B1SL is None:
            return None
        if (repeat, dtype) not in self._made:
            B, _, S, L = self.mask_B1SL.shape
            bias_B1SL = torch.zeros(B, 1, S, L, dtype=dtype, device=self.mask_B1SL.device)
            bias_B1SL.masked_fill_(~self.mask_B1SL, float("-inf"))
            self._made[repeat, dtype] = bias_B1SL.expand(B, repeat, S, L).reshape(B, 1, repeat * S, L)
        return self._made[repeat, dtype]

    def gather(self, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of the whole sequence [L, B, G, D] from all ranks. Differentiable."""
        if self.context is None:
            return k_SBGD, v_SBGD
        if k_SBGD.shape[-1] != v_SBGD.shape[-1]:
            return self.context.gather(k_SBGD), self.context.gather(v_SBGD)
        k, v = self.context.gather(torch.cat([k_SBGD, v_SBGD], 2)).chunk(2, 2)
        return k, v

    def remember(self, layer: int, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Write new rows of a layer to the cache, if there is one. Returns the visible keys and values [L, B, G, D]."""
        if self.cache is None:
            return k_SBGD, v_SBGD
        assert self.slots_BS is not None
        if "places" not in self._made:
            self._made["places"] = self.cache.places(self.slots_BS)
        self.cache.write(layer, k_SBGD, v_SBGD, self._made["places"])
        return self.cache.read(layer, self.key_slots) if self.key_slots else (k_SBGD, v_SBGD)


def within_window(mask: Tensor, window: int) -> Tensor:
    """Restrict `mask` [..., S, L] to the last `window` keys that each row sees.

    The visible keys of a row form a path in text order that ends at the row: a prefix of its document or, in a tree,
    accepted tokens and its ancestors. So the distance of a key is the number of visible keys after it.
    """
    return mask & (mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= window)


def visible_slots(first_B: Tensor, above_BSM: Tensor, length: int) -> Tensor:
    """bool [B, S, length]: key slots that each row sees, with tree node m in slot first_B + m.

    Args:
        first_B: slots before it are visible to every row.
        above_BSM: row s sees node m.
        length: number of key slots.
    """
    B, S, M = above_BSM.shape
    offset_BL = torch.arange(length, device=first_B.device) - first_B[:, None]
    inside_BL = (offset_BL >= 0) & (offset_BL < M)
    own_BSL = above_BSM.gather(2, offset_BL.clamp(0, M - 1)[:, None].expand(B, S, length)) & inside_BL[:, None]
    return own_BSL | (offset_BL < 0)[:, None]
