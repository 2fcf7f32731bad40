"""Attention over a causal, packed, or cached context: one plan, made once per forward, read by every layer.

S query rows, B batch, N query heads, G key/value heads (N a multiple of G), D head size, L key length.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.ops import context_attention
from megatron_spec.runtime.context import ContextShard

log = logging.getLogger(__name__)


class KVCache:
    """Keys and values of every layer for a batch of sequences of different lengths.

    Rolling back costs nothing: rows past the accepted length are never visible to a later query, because
    `AttentionPlan.cached` masks by slot, and they are overwritten by the next tokens.
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
        """Keys and values [B, G, length, D] of a layer."""
        return self.keys[layer, :, :length].transpose(1, 2), self.values[layer, :, :length].transpose(1, 2)


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
        first = torch.ones_like(documents_BS, dtype=torch.bool)
        first[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        starts = first.flatten().nonzero().flatten()
        starts = torch.cat([starts, starts.new_tensor([documents_BS.numel()])])
        return Documents(starts.int(), int(starts.diff().max()))


@dataclass
class AttentionPlan:
    """Who may look at whom in one forward pass.

    Attributes:
        mask_B1SL: bool, True where query row s may look at key l; None means plain causal over S = L.
        cache: where keys and values live while decoding; None in training.
        slots_BS: int64 cache slots that the S new rows are written to (decoding only).
        length: cache slots that are looked at (decoding only); 0: the new rows are the first of their sequences.
        lengths_B: tokens of each text that are known (decoding only); None: up to the last new row.
        documents: packed documents, instead of a mask (half precision on a GPU).
        context: the ranks that share the sequence; rows are this rank's, keys and values are gathered, and the mask is
            [B, 1, L, S].
        chunks: which keys this rank's chunks see, instead of a mask (half precision on a GPU).
    """

    mask_B1SL: Tensor | None = None
    cache: KVCache | None = None
    slots_BS: Tensor | None = None
    length: int = 0
    lengths_B: Tensor | None = None
    documents: Documents | None = None
    context: ContextShard | None = None
    chunks: list[context_attention.Chunk] | None = None
    _made: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def causal() -> AttentionPlan:
        """Every row sees itself and all earlier rows."""
        return AttentionPlan()

    @staticmethod
    def packed(documents_BS: Tensor, dtype: torch.dtype = torch.float32) -> AttentionPlan:
        """Causal inside each document; rows of different documents never see each other.

        Memory is linear in S where variable-length attention runs for `dtype`, else a mask [B, 1, S, S] is made.
        """
        if documents_BS.is_cuda and dtype in (torch.bfloat16, torch.float16):
            return AttentionPlan(documents=Documents.of(documents_BS))
        S = documents_BS.shape[1]
        same = documents_BS[:, :, None] == documents_BS[:, None, :]
        causal = torch.ones(S, S, dtype=torch.bool, device=documents_BS.device).tril()
        return AttentionPlan(mask_B1SL=(same & causal)[:, None])

    @staticmethod
    def sharded(documents_BS: Tensor, context: ContextShard, dtype: torch.dtype) -> AttentionPlan:
        """Causal inside each document, for this rank's rows of sequences that several ranks share."""
        if documents_BS.is_cuda and dtype in (torch.bfloat16, torch.float16):
            return AttentionPlan(context=context, chunks=context_attention.chunks_of(documents_BS, context))
        return AttentionPlan(mask_B1SL=context_attention.visible(documents_BS, context), context=context)

    @staticmethod
    def prefill(cache: KVCache, slots_BS: Tensor, lengths_B: Tensor | None = None) -> AttentionPlan:
        """The rows begin their sequences: they see one another causally, and are written to `slots_BS`."""
        return AttentionPlan(cache=cache, slots_BS=slots_BS, lengths_B=lengths_B)

    @staticmethod
    def cached(
        cache: KVCache, slots_BS: Tensor, visible_BSL: Tensor | None = None, length: int | None = None,
        lengths_B: Tensor | None = None,
    ) -> AttentionPlan:  # fmt: skip
        """New rows are written to `slots_BS` and see every slot up to their own, or `visible_BSL` (trees).

        Args:
            length: a bound of the slots; found from `slots_BS` (which waits for the device) when it is not known.
        """
        if length is None:
            length = int(slots_BS.max()) + 1
        if visible_BSL is None:
            visible_BSL = torch.arange(length, device=slots_BS.device) <= slots_BS[:, :, None]
        return AttentionPlan(visible_BSL[:, None], cache, slots_BS, length, lengths_B)

    def remember(self, layer: int, k_SBGD: Tensor, v_SBGD: Tensor) -> None:
        """Write the new rows of a layer to the cache."""
        assert self.cache is not None and self.slots_BS is not None
        if "places" not in self._made:
            self._made["places"] = self.cache.places(self.slots_BS)
        self.cache.write(layer, k_SBGD, v_SBGD, self._made["places"])

    def bias(self, repeat: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, repeat * S, L] the mask as 0 and -inf, once for each query head of a group: made once per forward."""
        if (repeat, dtype) not in self._made:
            assert self.mask_B1SL is not None
            B, _, S, L = self.mask_B1SL.shape
            bias_B1SL = torch.zeros(B, 1, S, L, dtype=dtype, device=self.mask_B1SL.device)
            bias_B1SL.masked_fill_(~self.mask_B1SL, float("-inf"))
            self._made[repeat, dtype] = bias_B1SL.expand(B, repeat, S, L).reshape(B, 1, repeat * S, L)
        return self._made[repeat, dtype]


@dataclass(frozen=True)
class Variant:
    """What the attention of a layer has beyond plain softmax.

    Attributes:
        window: a row sees itself and the window - 1 rows before it; None: all before it.
        sinks_N: a score per query head that takes part in the softmax and has no value.
        scale: of the scores; None: 1/sqrt(D).
    """

    window: int | None = None
    sinks_N: Tensor | None = None
    scale: float | None = None


PLAIN = Variant()


def attend(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, plan: AttentionPlan, layer: int, variant: Variant = PLAIN
) -> Tensor:
    """Softmax attention of `layer` under `plan`; scores are scaled by 1/sqrt(D).

    Returns [S, B, N*D], in the layout and dtype of the query.
    """
    if variant != PLAIN or v_SBGD.shape[-1] != q_SBND.shape[-1]:
        return _attend_variant(q_SBND, k_SBGD, v_SBGD, plan, layer, variant)
    S, B, N, D = q_SBND.shape
    if plan.context is not None:
        k_SBGD, v_SBGD = plan.context.gather(torch.cat([k_SBGD, v_SBGD], 2)).chunk(2, 2)
        if plan.chunks is not None:
            q, k, v = (x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD))
            return context_attention.forward(q, k, v, plan.chunks)[0].transpose(0, 1).reshape(S, B, N * D)
    if plan.documents is not None:
        return causal_attention(q_SBND, k_SBGD, v_SBGD, plan.documents).reshape(S, B, N * D)
    if plan.cache is not None:
        plan.remember(layer, k_SBGD, v_SBGD)
        if plan.mask_B1SL is not None:
            return _attend_cached(q_SBND, *plan.cache.read(layer, plan.length), plan)
    k, v = k_SBGD.permute(1, 2, 0, 3), v_SBGD.permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        q_SBND.permute(1, 2, 0, 3),
        k,
        v,
        attn_mask=plan.mask_B1SL,
        is_causal=plan.mask_B1SL is None,
        enable_gqa=k.shape[1] != N,
    )
    return out.permute(2, 0, 1, 3).reshape(S, B, N * D)


def _attend_cached(q_SBND: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, plan: AttentionPlan) -> Tensor:
    """Query heads that share keys stand below one another as rows: keys are not repeated, and any kernel will do."""
    S, B, N, D = q_SBND.shape
    G = k_BGLD.shape[1]
    q = q_SBND.unflatten(2, (G, N // G)).permute(1, 2, 3, 0, 4).reshape(B, G, N // G * S, D)
    out = F.scaled_dot_product_attention(q, k_BGLD, v_BGLD, attn_mask=plan.bias(N // G, q.dtype))
    return out.unflatten(2, (N // G, S)).permute(3, 0, 1, 2, 4).reshape(S, B, -1)


def within_window(mask: Tensor, window: int) -> Tensor:
    """The last `window` keys that each row of `mask` [..., S, L] sees.

    What a row sees is a path that ends in itself and lies in the order of the text: a prefix of its document, or, in
    a tree, accepted tokens and its ancestors. So distance is the number of visible keys after a key.
    """
    return mask & (mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= window)


def _attend_variant(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, plan: AttentionPlan, layer: int, variant: Variant
) -> Tensor:
    """`attend` with windows, sinks, another scale, or values of another size than keys."""
    S, B, N, _ = q_SBND.shape
    half_on_gpu = q_SBND.is_cuda and q_SBND.dtype in (torch.bfloat16, torch.float16)
    if plan.cache is not None:
        plan.remember(layer, k_SBGD, v_SBGD)
    if half_on_gpu and plan.mask_B1SL is None:
        return _flash_variant(q_SBND, k_SBGD, v_SBGD, plan, variant)
    if plan.context is not None:
        k_SBGD, v_SBGD = plan.context.gather(k_SBGD), plan.context.gather(v_SBGD)
    if plan.cache is not None and plan.mask_B1SL is not None:
        k, v = plan.cache.read(layer, plan.length)
    else:
        k, v = k_SBGD.permute(1, 2, 0, 3), v_SBGD.permute(1, 2, 0, 3)
    q, mask = q_SBND.permute(1, 2, 0, 3), plan.mask_B1SL
    if mask is None:
        mask = torch.ones(S, k.shape[2], dtype=torch.bool, device=q.device).tril()
    if variant.window is not None and variant.window < k.shape[2]:
        mask = within_window(mask, variant.window)
    if variant.sinks_N is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=variant.scale, enable_gqa=k.shape[1] != N
        )  # fmt: skip
    else:
        out = _with_sinks(q, k, v, mask, variant.sinks_N, variant.scale)
    return out.permute(2, 0, 1, 3).reshape(S, B, -1)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks_N: Tensor, scale: float | None) -> Tensor:
    """q [B, N, S, D] over k, v [B, G, L, D]: softmax over the keys and a sink per head."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, float("-inf"))
    sinks = sinks_N.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return shares[..., :-1].to(v.dtype) @ v


def _flash_variant(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, plan: AttentionPlan, variant: Variant) -> Tensor:
    """Variable-length flash attention: windows and scale are its own, a sink is a factor found from the log-sum-exp."""
    S, B, N, D = q_SBND.shape
    size = v_SBGD.shape[-1]
    if size != D:  # latent attention: the kernel wants one size
        v_SBGD = F.pad(v_SBGD, (0, D - size))
    window = -1 if variant.window is None else variant.window - 1
    if plan.context is not None:
        assert plan.chunks is not None
        k_SBGD, v_SBGD = plan.context.gather(k_SBGD), plan.context.gather(v_SBGD)
        q, k, v = (x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD))
        out, lse, _ = context_attention.forward(q, k, v, plan.chunks, scale=variant.scale, window=window)
    else:
        documents = plan.documents or Documents.of(torch.arange(B, device=q_SBND.device)[:, None].expand(B, S))
        flat = (x.transpose(0, 1).reshape(B * S, -1, D) for x in (q_SBND, k_SBGD, v_SBGD))
        starts, longest = documents.starts, documents.longest
        options = {} if window < 0 else {"window_size_left": window, "window_size_right": 0}
        found = torch.ops.aten._flash_attention_forward(
            *flat, starts, starts, longest, longest, 0.0, True, False, scale=variant.scale, **options
        )
        out, lse = found[0].view(B, S, N, D), found[1].t().reshape(B, S, N)
    if variant.sinks_N is not None:
        out = out * torch.sigmoid(lse - variant.sinks_N.float())[..., None].to(out.dtype)
    return out[..., :size].transpose(0, 1).reshape(S, B, N * size)


@functools.cache
def _cudnn_version() -> int:
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError as error:  # another library loaded an older cuDNN first
        log.warning("attention falls back from cuDNN to flash attention 2: %s", error)
        return 0


def cudnn_runs(q: Tensor) -> bool:
    """True where cuDNN's attention is there and faster than flash attention 2: Hopper, half precision.

    Users turn it off with `torch.backends.cuda.enable_cudnn_sdp(False)`.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in (64, 128)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and _cudnn_version() >= 91000
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def causal_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, documents: Documents | None = None) -> Tensor:
    """Causal attention without gradients, inside documents if given, scores scaled by 1/sqrt(D): [S, B, N, D]."""
    if documents is not None:
        S, B, N, D = q_SBND.shape
        flat = (x.transpose(0, 1).reshape(B * S, -1, D) for x in (q_SBND, k_SBGD, v_SBGD))
        starts, longest = documents.starts, documents.longest
        out = torch.ops.aten._flash_attention_forward(*flat, starts, starts, longest, longest, 0.0, True, False)[0]
        return out.view(B, S, N, D).transpose(0, 1)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    if cudnn_runs(q):
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True, False)[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3)
