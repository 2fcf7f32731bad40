"""Key visibility: which keys each query row of one forward sees. Made once per forward, read by every layer.

S query rows, B batch, G key/value heads, D head size, L key length (under context parallelism: S is this rank's part
of the L rows of the sequence).
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

    Rolling back costs nothing: rows past the accepted length are never visible to a later query, because
    `Visibility.cached` masks by slot, and they are overwritten by the next tokens.
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
        """int64 [S * B] rows of a layer, seen as [B * max_length, ...], that `slots_BS` stand for."""
        first_B = torch.arange(slots_BS.shape[0], device=slots_BS.device) * self.keys.shape[2]
        return (slots_BS.t() + first_B).reshape(-1)

    def write(self, layer: int, k_SBGD: Tensor, v_SBGD: Tensor, places_R: Tensor) -> None:
        """Put new rows of a layer where `places` said."""
        for kept, new in ((self.keys[layer], k_SBGD), (self.values[layer], v_SBGD)):
            kept.flatten(0, 1).index_copy_(0, places_R, new.flatten(0, 1))

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, B, G, D] of a layer."""
        return self.keys[layer, :, :length].transpose(0, 1), self.values[layer, :, :length].transpose(0, 1)


@dataclass
class Documents:
    """Packed documents for variable-length attention over the flattened [B * S] rows.

    Attributes:
        starts: int32 [documents + 1], first row of every document, and B * S.
        longest: rows of the longest document.
    """

    starts: Tensor
    longest: int

    @staticmethod
    def of(documents_BS: Tensor) -> Documents:
        """From the document number of every row (padding: -1); documents are contiguous."""
        starts = _begins(documents_BS).flatten().nonzero().flatten()
        starts = torch.cat([starts, starts.new_tensor([documents_BS.numel()])])
        return Documents(starts.int(), int(starts.diff().max()))

    @staticmethod
    def whole(B: int, S: int, device: torch.device) -> Documents:
        """Every row of the batch is one document."""
        return Documents(torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device), S)


@dataclass
class Chunk:
    """One contiguous piece of the queries of a context parallel rank.

    Attributes:
        first, end: its rows among the rank's rows.
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

    A chunk sees the keys before its end (inside its document), which variable-length flash attention expresses with
    different starts for queries and keys; the causal mask is aligned at the last row of each document.
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
    """Causal by default; inside documents where they are given; or what a mask over cache slots shows.

    The forms that kernels read (mask, starts of documents, chunks) are made when they are first asked for.

    Attributes:
        documents_BL: document number of every row of the whole sequence (padding: -1), where rows hold several, or
            where the sequence is shared by ranks; None: causal over all rows.
        context: the ranks that share the sequence: queries are this rank's rows, keys and values those of all ranks.
        cache: where keys and values live while decoding; None in training.
        slots_BS: int64 cache slots that the S new rows are written to (decoding only).
        visible_BSL: bool, which of the first L cache slots each new row sees (decoding only); None: the new rows are
            the first of their sequences and see one another causally.
        lengths_B: tokens of each text that are known (decoding only); None: up to the last new row.
    """

    documents_BL: Tensor | None = None
    context: ContextShard | None = None
    cache: KVCache | None = None
    slots_BS: Tensor | None = None
    visible_BSL: Tensor | None = None
    lengths_B: Tensor | None = None
    _made: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def causal() -> Visibility:
        """Every row sees itself and all earlier rows."""
        return Visibility()

    @staticmethod
    def of(batch: Batch) -> Visibility:
        """Of a training batch: causal inside each document."""
        if batch.context is None and batch.single_document:  # padding after it is harmless
            return Visibility()
        return Visibility(batch.documents_BS, batch.context)

    @staticmethod
    def prefill(cache: KVCache, slots_BS: Tensor, lengths_B: Tensor | None = None) -> Visibility:
        """The rows begin their sequences: they see one another causally, and are written to `slots_BS`."""
        return Visibility(cache=cache, slots_BS=slots_BS, lengths_B=lengths_B)

    @staticmethod
    def cached(
        cache: KVCache, slots_BS: Tensor, visible_BSL: Tensor | None = None, length: int | None = None,
        lengths_B: Tensor | None = None,
    ) -> Visibility:  # fmt: skip
        """New rows are written to `slots_BS` and see every slot up to their own, or `visible_BSL` (trees).

        Args:
            length: a bound of the slots; found from `slots_BS` (a device synchronisation) when it is not known.
        """
        if visible_BSL is None:
            if length is None:
                length = int(slots_BS.max()) + 1
            visible_BSL = torch.arange(length, device=slots_BS.device) <= slots_BS[:, :, None]
        return Visibility(cache=cache, slots_BS=slots_BS, visible_BSL=visible_BSL, lengths_B=lengths_B)

    @property
    def is_causal(self) -> bool:
        """Every row sees all earlier rows of its sequence: no document borders, no mask."""
        return self.documents_BL is None and self.visible_BSL is None

    @cached_property
    def documents(self) -> Documents:
        """Starts of the documents, for variable-length attention."""
        assert self.documents_BL is not None
        return Documents.of(self.documents_BL)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Which keys this rank's chunks of a shared sequence see."""
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
        """[B, 1, repeat * S, L] the mask as 0 and -inf, once for each query head of a group; None: causal."""
        if self.mask_B1SL is None:
            return None
        if (repeat, dtype) not in self._made:
            B, _, S, L = self.mask_B1SL.shape
            bias_B1SL = torch.zeros(B, 1, S, L, dtype=dtype, device=self.mask_B1SL.device)
            bias_B1SL.masked_fill_(~self.mask_B1SL, float("-inf"))
            self._made[repeat, dtype] = bias_B1SL.expand(B, repeat, S, L).reshape(B, 1, repeat * S, L)
        return self._made[repeat, dtype]

    def gather(self, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence [L, B, G, D], from those of this rank. Differentiable."""
        if self.context is None:
            return k_SBGD, v_SBGD
        if k_SBGD.shape[-1] != v_SBGD.shape[-1]:
            return self.context.gather(k_SBGD), self.context.gather(v_SBGD)
        k, v = self.context.gather(torch.cat([k_SBGD, v_SBGD], 2)).chunk(2, 2)
        return k, v

    def remember(self, layer: int, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows of a layer to the cache, if there is one; keys and values [L, B, G, D] that are seen."""
        if self.cache is None:
            return k_SBGD, v_SBGD
        assert self.slots_BS is not None
        if "places" not in self._made:
            self._made["places"] = self.cache.places(self.slots_BS)
        self.cache.write(layer, k_SBGD, v_SBGD, self._made["places"])
        return (k_SBGD, v_SBGD) if self.visible_BSL is None else self.cache.read(layer, self.visible_BSL.shape[-1])


def within_window(mask: Tensor, window: int) -> Tensor:
    """The last `window` keys that each row of `mask` [..., S, L] sees.

    What a row sees is a path that ends in itself and lies in the order of the text: a prefix of its document, or, in
    a tree, accepted tokens and its ancestors. So distance is the number of visible keys after a key.
    """
    return mask & (mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= window)
