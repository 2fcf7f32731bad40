"""Kernels of softmax attention, forward and backward; `attention.py` selects among them.

They take and return tensors [B, rows, heads, D]. Backward passes accept the output and log-sum-exp of an attention over
more keys (`ttt_attention.py`) and return the gradients of this part.

S query rows, B batch, N query heads, G key/value heads (N a multiple of G), D head size, L key length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.ops.visibility import Documents, Visibility, within_window

_aten = torch.ops.aten
_flash, _flash_backward = _aten._flash_attention_forward, _aten._flash_attention_backward

State = tuple[Tensor, ...]
"""State that a kernel saves for its backward pass, besides output and log-sum-exp."""


@dataclass(frozen=True)
class Variant:
    """Options of a layer's attention beyond plain softmax.

    Attributes:
        window: a row sees itself and the window - 1 rows before it; None: all rows before it.
        sinks_N: a score per query head that enters the softmax without a value.
        scale: scale of the scores; None: 1/sqrt(D).
    """

    window: int | None = None
    sinks_N: Tensor | None = None
    scale: float | None = None


PLAIN = Variant()


@dataclass(frozen=True)
class Call:
    """One attention: q [B, S, N, D] over k [B, L, G, D] and v [B, L, G, Dv].

    Attributes:
        lse: the log-sum-exp is needed, by the caller or by a backward pass.
        causal: without a mask, rows see the keys up to their own; False: all keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    variant: Variant = PLAIN
    lse: bool = False
    causal: bool = True

    @property
    def plain(self) -> bool:
        """No window, sinks or scale, and values have the head size of keys."""
        return self.variant is PLAIN and self.v.shape[-1] == self.q.shape[-1]


# ---- cached: decoding


def cached(c: Call) -> tuple[Tensor, Tensor, State]:
    """Fold query heads that share keys into rows: keys are not repeated, and any kernel of torch works."""
    B, S, N, D = c.q.shape
    G = c.k.shape[2]
    q = c.q.unflatten(2, (G, N // G)).permute(0, 2, 3, 1, 4).reshape(B, G, N // G * S, D)
    bias = c.visibility.bias(q.dtype, N // G)
    out = F.scaled_dot_product_attention(q, c.k.transpose(1, 2), c.v.transpose(1, 2), attn_mask=bias)
    out_SBND = out.unflatten(2, (N // G, S)).permute(3, 0, 1, 2, 4).reshape(S, B, N, D)
    return out_SBND.transpose(0, 1), out.new_empty(0), ()


# ---- chunks: context parallelism, packed rows, windows or sinks


def chunks(c: Call) -> tuple[Tensor, Tensor, State]:
    """Flash attention of variable lengths: each chunk of rows over the keys that it may see."""
    (B, _, N, D), size = c.q.shape, c.v.shape[-1]
    k, v = (x.flatten(0, 1) for x in (c.k, _padded(c.v, D)))
    outs, lses, state = [], [], []
    for chunk in c.visibility.chunks:
        q_c = c.q[:, chunk.first : chunk.end].reshape(-1, N, D)
        k_c, v_c = (x.index_select(0, chunk.keys) for x in (k, v))
        starts = (chunk.starts_q, chunk.starts_k, chunk.longest_q, chunk.longest_k)
        o, lse, *kept, _ = _flash(q_c, k_c, v_c, *starts, 0.0, True, False, **_options(c.variant))
        outs.append(o.reshape(B, -1, N, D))
        lses.append(lse.reshape(N, B, -1).permute(1, 2, 0))
        state += kept
    return _sunk(torch.cat(outs, 1)[..., :size], torch.cat(lses, 1), tuple(state), c.variant)


def chunks_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `chunks`."""
    (B, _, N, D), chunks = c.q.shape, c.visibility.chunks
    dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (c.k, c.v))
    dqs, each = [], len(state) // len(chunks)
    for i, chunk in enumerate(chunks):
        part = slice(chunk.first, chunk.end)
        do_c, q_c, o_c = (x[:, part].reshape(-1, N, D) for x in (do, c.q, o))
        lse_c = lse[:, part].permute(2, 0, 1).reshape(N, -1).contiguous()
        k_c, v_c = (x.flatten(0, 1).index_select(0, chunk.keys) for x in (c.k, c.v))
        starts = (chunk.starts_q, chunk.starts_k, chunk.longest_q, chunk.longest_k)
        kept = state[i * each : (i + 1) * each]
        dq_c, dk_c, dv_c = _flash_backward(
            do_c, q_c, k_c, v_c, o_c, lse_c, *starts, 0.0, True, *kept, **_options(c.variant)
        )
        dqs.append(dq_c.reshape(B, -1, N, D))
        for total, piece in ((dk, dk_c), (dv, dv_c)):
            total.view(-1, *piece.shape[1:]).index_add_(0, chunk.keys, piece)
    return torch.cat(dqs, 1), dk, dv


# ---- documents: packed rows, and windows or sinks over unpacked ones


def _documents_of(c: Call) -> Documents:
    if c.visibility.documents_BL is not None:
        return c.visibility.documents
    return Documents.whole(c.q.shape[0], c.q.shape[1], c.q.device)


def documents(c: Call) -> tuple[Tensor, Tensor, State]:
    """Flash attention of variable lengths over the documents of packed rows."""
    (B, S, N, D), size, documents = c.q.shape, c.v.shape[-1], _documents_of(c)
    flat = (x.reshape(B * S, -1, D) for x in (c.q, c.k, _padded(c.v, D)))
    starts = (documents.starts, documents.starts, documents.longest, documents.longest)
    o, lse, *state, _ = _flash(*flat, *starts, 0.0, True, False, **_options(c.variant))
    return _sunk(o.view(B, S, N, D)[..., :size], lse.view(N, B, S).permute(1, 2, 0), tuple(state), c.variant)


def documents_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `documents`."""
    (B, S, N, D), documents = c.q.shape, _documents_of(c)
    flat = (x.reshape(B * S, -1, D) for x in (do, c.q, c.k, c.v, o))
    lse_NR = lse.permute(2, 0, 1).reshape(N, B * S).contiguous()
    starts = (documents.starts, documents.starts, documents.longest, documents.longest)
    grads = _flash_backward(*flat, lse_NR, *starts, 0.0, True, *state, **_options(c.variant))
    dq, dk, dv = (x.view(B, S, -1, D) for x in grads)
    return dq, dk, dv


def _padded(v: Tensor, size: int) -> Tensor:
    """Values padded to the head size of keys, as flash attention requires (in latent attention they differ)."""
    return v if v.shape[-1] == size else F.pad(v, (0, size - v.shape[-1]))


def _options(variant: Variant) -> dict[str, Any]:
    window = {} if variant.window is None else {"window_size_left": variant.window - 1, "window_size_right": 0}
    return {"scale": variant.scale} | window


def _sunk(o: Tensor, lse: Tensor, state: State, variant: Variant) -> tuple[Tensor, Tensor, State]:
    """Apply sinks: a factor computed from the log-sum-exp of the keys."""
    if variant.sinks_N is not None:
        o = o * torch.sigmoid(lse - variant.sinks_N.float())[..., None].to(o.dtype)
    return o, lse, state


# ---- cudnn, flash, cpu: causal over unpacked rows


def cudnn(c: Call) -> tuple[Tensor, Tensor, State]:
    """cuDNN's attention."""
    B, S, N, _ = c.q.shape
    heads_first = _heads_first(c.q, c.k, c.v)
    found = _aten._scaled_dot_product_cudnn_attention(*heads_first, None, c.lse, 0.0, c.causal, False)
    if not c.lse:
        return found[0].transpose(1, 2), found[1], ()
    o, lse, _, _, _, _, *rng, _ = found
    return o.transpose(1, 2), lse.view(B, N, S).transpose(1, 2), tuple(rng)


def cudnn_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `cudnn`."""
    S, L, lse_BNS1 = c.q.shape[1], c.k.shape[1], lse.transpose(1, 2).contiguous()[..., None]
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(do, c.q, c.k, c.v, o), lse_BNS1, *state, None, None, None, S, L, 0.0, c.causal
    )
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


def flash_whole(c: Call) -> tuple[Tensor, Tensor, State]:
    """Flash attention of unpacked rows."""
    S, L = c.q.shape[1], c.k.shape[1]
    o, lse, *state, _ = _flash(c.q, c.k, c.v, None, None, S, L, 0.0, c.causal, False)
    return o, lse.transpose(1, 2), tuple(state)


def flash_whole_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `flash_whole`."""
    S, L, lse_BNS = c.q.shape[1], c.k.shape[1], lse.transpose(1, 2).contiguous()
    dq, dk, dv = _flash_backward(do, c.q, c.k, c.v, o, lse_BNS, None, None, S, L, 0.0, c.causal, *state)
    return dq, dk, dv


def _bias(c: Call) -> Tensor | None:
    """The mask as 0 and -inf. With a window it is rebuilt for each call, because windows differ between draft steps."""
    if c.variant.window is None or c.variant.window >= c.k.shape[1]:
        return c.visibility.bias(c.q.dtype)
    mask = _mask(c)
    assert mask is not None
    return torch.zeros(mask.shape, dtype=c.q.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def cpu(c: Call) -> tuple[Tensor, Tensor, State]:
    """torch's flash attention for CPUs."""
    bias = _bias(c)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(c.q, c.k, c.v), 0.0, bias is None and c.causal, attn_mask=bias
    )
    return o.transpose(1, 2), lse.transpose(1, 2), ()


def cpu_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, _: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `cpu`."""
    bias = _bias(c)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(do, c.q, c.k, c.v, o, lse), 0.0, bias is None and c.causal, attn_mask=bias
    )
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, rows, heads, ...] -> [B, heads, rows, ...], and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


# ---- torch, scores: any device


def _mask(c: Call) -> Tensor | None:
    """bool mask of documents, cache and window; None: causal."""
    mask, window = c.visibility.mask_B1SL, c.variant.window
    if window is None or window >= c.k.shape[1]:
        return mask
    return within_window(_causal(c) if mask is None else mask, window)


def _causal(c: Call) -> Tensor:
    ones = torch.ones(c.q.shape[1], c.k.shape[1], dtype=torch.bool, device=c.q.device)
    return ones.tril() if c.causal else ones


def sdpa(c: Call) -> tuple[Tensor, Tensor, State]:
    """torch's `scaled_dot_product_attention`; no log-sum-exp."""
    q, k, v = _heads_first(c.q, c.k, c.v)
    mask = _mask(c)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and c.causal,
        scale=c.variant.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out.transpose(1, 2), out.new_empty(0), ()


def _masked_scores(c: Call) -> Tensor:
    """[B, N, S, L] in fp32, or fp64 when the input is fp64."""
    n, scale = c.q.shape[2] // c.k.shape[2], c.variant.scale or 1 / math.sqrt(c.q.shape[-1])
    scores = torch.einsum("bsnd,blnd->bnsl", c.q, c.k.repeat_interleave(n, 2))
    mask = _mask(c)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return wide.masked_fill(~(_causal(c) if mask is None else mask), -math.inf)


def scores(c: Call) -> tuple[Tensor, Tensor, State]:
    """Materialised scores."""
    scores, n = _masked_scores(c), c.q.shape[2] // c.v.shape[2]
    lse = scores.logsumexp(-1)
    if c.variant.sinks_N is not None:
        lse = torch.logaddexp(lse, c.variant.sinks_N.to(lse.dtype)[:, None])
    shares = (scores - lse[..., None]).exp().to(c.v.dtype)
    return torch.einsum("bnsl,blnd->bsnd", shares, c.v.repeat_interleave(n, 2)), lse.transpose(1, 2), ()


def scores_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, _: State) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `scores`."""
    N, D = c.q.shape[2:]
    G = c.k.shape[2]
    p = (_masked_scores(c) - lse.transpose(1, 2)[..., None]).exp()
    dp = torch.einsum("bsnd,blnd->bnsl", do, c.v.repeat_interleave(N // G, 2)).to(p.dtype)
    delta = (do * o).sum(-1, dtype=p.dtype).transpose(1, 2)
    ds = (p * (dp - delta[..., None]) / math.sqrt(D)).to(c.q.dtype)
    dq = torch.einsum("bnsl,blnd->bsnd", ds, c.k.repeat_interleave(N // G, 2))
    dk = torch.einsum("bnsl,bsnd->blnd", ds, c.q).unflatten(2, (G, -1)).sum(3)
    dv = torch.einsum("bnsl,bsnd->blnd", p.to(do.dtype), do).unflatten(2, (G, -1)).sum(3)
    return dq, dk, dv
