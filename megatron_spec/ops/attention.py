"""Softmax attention: one table of kernels, forward and backward, selected by visibility and device.

Kernels take and return tensors [B, rows, heads, D]. Backward passes accept the output and log-sum-exp of an attention
over more keys (`ttt_attention.py`) and return the gradients of this part.

S query rows, B batch, N query heads, G key/value heads (N a multiple of G), D head size, L key length.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_spec.ops.visibility import Documents, Visibility, within_window

log = logging.getLogger(__name__)

_aten = torch.ops.aten
_flash, _flash_backward = _aten._flash_attention_forward, _aten._flash_attention_backward

State = tuple[Tensor, ...]
"""State that a kernel saves for its backward pass, besides output and log-sum-exp."""
Forward = Callable[["Call"], tuple[Tensor, Tensor, State]]
Backward = Callable[["Call", Tensor, Tensor, Tensor, State], tuple[Tensor, Tensor, Tensor]]


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

    @property
    def flash(self) -> bool:
        """CUDA flash attention supports the dtype and the head size."""
        half = self.q.dtype in (torch.bfloat16, torch.float16)
        return self.q.is_cuda and half and self.q.shape[-1] % 8 == 0 and self.q.shape[-1] <= 256


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    Attributes:
        name: name of the kernel.
        serves: predicate: the kernel supports a call.
        forward: call -> (o [B, S, N, Dv], lse [B, S, N], state). Without `Call.lse`, the log-sum-exp may be empty.
        backward: (call, do, o, lse, state) -> (dq, dk, dv); None: no support for gradients.
    """

    name: str
    serves: Callable[[Call], bool]
    forward: Forward
    backward: Backward | None = None


# ---- cached: decoding


def _cached(c: Call) -> tuple[Tensor, Tensor, State]:
    """Fold query heads that share keys into rows: keys are not repeated, and any kernel of torch works."""
    B, S, N, D = c.q.shape
    G = c.k.shape[2]
    q = c.q.unflatten(2, (G, N // G)).permute(0, 2, 3, 1, 4).reshape(B, G, N // G * S, D)
    bias = c.visibility.bias(q.dtype, N // G)
    out = F.scaled_dot_product_attention(q, c.k.transpose(1, 2), c.v.transpose(1, 2), attn_mask=bias)
    out_SBND = out.unflatten(2, (N // G, S)).permute(3, 0, 1, 2, 4).reshape(S, B, N, D)
    return out_SBND.transpose(0, 1), out.new_empty(0), ()


# ---- parts: context parallelism, one document per sequence


def _parts_serve(c: Call) -> bool:
    shared = c.visibility.context is not None and c.visibility.single
    return shared and c.plain and (c.flash or c.q.device.type == "cpu")


def _parts_of(c: Call) -> list[tuple[slice, slice]]:
    """(a chunk of this rank's rows, the same rows in the sequence)."""
    assert c.visibility.context is not None
    length = c.q.shape[1] // 2
    places = c.visibility.context.chunks(c.visibility.context.size * c.q.shape[1])
    return [(slice(i * length, (i + 1) * length), slice(*place)) for i, place in enumerate(places)]


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    return Call(q, k, v, Visibility.causal(), lse=True, causal=causal)


def _parts(c: Call, whole: Callable[[], tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Tensor, State]:
    """A chunk sees its own rows causally, and all rows before them: two dense attentions, merged.

    Args:
        whole: waits for keys and values of the sequence while chunks attend to themselves; k and v of the call are
            then those of this rank's rows. None: they are whole.
    """
    parts = _parts_of(c)
    calls = [
        _dense(c.q[:, rows], c.k[:, at], c.v[:, at], True)
        for rows, place in parts
        for at in [place if whole is None else rows]
    ]
    own = [kernel_of(call).forward(call) for call in calls]
    keys, values = (c.k, c.v) if whole is None else whole()
    o = torch.empty_like(c.q)
    state: list[Tensor] = []
    lse = torch.empty(c.q.shape[:3], dtype=own[0][1].dtype, device=c.q.device)
    for (rows, place), (o_own, lse_own, kept) in zip(parts, own, strict=True):
        state += kept
        if place.start == 0:
            o[:, rows], lse[:, rows] = o_own, lse_own
            continue
        call = _dense(c.q[:, rows], keys[:, : place.start], values[:, : place.start], False)
        o_before, lse_before, kept = kernel_of(call).forward(call)
        state += kept
        share = torch.sigmoid(lse_before - lse_own).to(o.dtype)[..., None]
        o[:, rows], lse[:, rows] = torch.lerp(o_own, o_before, share), torch.logaddexp(lse_own, lse_before)
    return o, lse, tuple(state)


def _parts_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    parts = _parts_of(c)
    dq = torch.empty_like(c.q)
    dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (c.k, c.v))
    count = sum(1 + (place.start > 0) for _, place in parts)
    kept = iter(state[i : i + len(state) // count] for i in range(0, len(state), max(1, len(state) // count)))
    for rows, place in parts:
        for keys in (place, slice(0, place.start)):
            if keys.stop == 0:
                continue
            call = _dense(c.q[:, rows], c.k[:, keys], c.v[:, keys], keys is place)
            kernel = kernel_of(call)
            assert kernel.backward is not None
            found = kernel.backward(call, do[:, rows], o[:, rows], lse[:, rows], next(kept, ()))
            dk[:, keys] += found[1]
            dv[:, keys] += found[2]
            if keys is place:
                dq[:, rows] = found[0]
            else:
                dq[:, rows] += found[0]
    return dq, dk, dv


# ---- chunks: context parallelism, packed rows, windows or sinks


def _chunks(c: Call) -> tuple[Tensor, Tensor, State]:
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


def _chunks_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
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


def _documents(c: Call) -> tuple[Tensor, Tensor, State]:
    (B, S, N, D), size, documents = c.q.shape, c.v.shape[-1], _documents_of(c)
    flat = (x.reshape(B * S, -1, D) for x in (c.q, c.k, _padded(c.v, D)))
    starts = (documents.starts, documents.starts, documents.longest, documents.longest)
    o, lse, *state, _ = _flash(*flat, *starts, 0.0, True, False, **_options(c.variant))
    return _sunk(o.view(B, S, N, D)[..., :size], lse.view(N, B, S).permute(1, 2, 0), tuple(state), c.variant)


def _documents_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
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


@functools.cache
def _cudnn_version() -> int:
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError as error:  # another library loaded an older cuDNN first
        log.warning("attention falls back from cuDNN to flash attention 2: %s", error)
        return 0


def _cudnn_serves(c: Call) -> bool:
    """cuDNN is faster than flash attention 2 on Hopper. Its plans depend on the shape, so it is not used for prompts.

    `torch.backends.cuda.enable_cudnn_sdp(False)` disables it.
    """
    return (
        c.plain
        and c.flash
        and c.visibility.is_causal
        and c.visibility.cache is None
        and c.q.shape[-1] in (64, 128)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and _cudnn_version() >= 91000
        and torch.cuda.get_device_capability(c.q.device) >= (9, 0)
    )


def _cudnn(c: Call) -> tuple[Tensor, Tensor, State]:
    B, S, N, _ = c.q.shape
    heads_first = _heads_first(c.q, c.k, c.v)
    found = _aten._scaled_dot_product_cudnn_attention(*heads_first, None, c.lse, 0.0, c.causal, False)
    if not c.lse:
        return found[0].transpose(1, 2), found[1], ()
    o, lse, _, _, _, _, *rng, _ = found
    return o.transpose(1, 2), lse.view(B, N, S).transpose(1, 2), tuple(rng)


def _cudnn_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    S, L, lse_BNS1 = c.q.shape[1], c.k.shape[1], lse.transpose(1, 2).contiguous()[..., None]
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(do, c.q, c.k, c.v, o), lse_BNS1, *state, None, None, None, S, L, 0.0, c.causal
    )
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


def _flash_whole(c: Call) -> tuple[Tensor, Tensor, State]:
    S, L = c.q.shape[1], c.k.shape[1]
    o, lse, *state, _ = _flash(c.q, c.k, c.v, None, None, S, L, 0.0, c.causal, False)
    return o, lse.transpose(1, 2), tuple(state)


def _flash_whole_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
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


def _cpu(c: Call) -> tuple[Tensor, Tensor, State]:
    bias = _bias(c)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(c.q, c.k, c.v), 0.0, bias is None and c.causal, attn_mask=bias
    )
    return o.transpose(1, 2), lse.transpose(1, 2), ()


def _cpu_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, _: State) -> tuple[Tensor, Tensor, Tensor]:
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


def _torch(c: Call) -> tuple[Tensor, Tensor, State]:
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


def _scores(c: Call) -> tuple[Tensor, Tensor, State]:
    scores, n = _masked_scores(c), c.q.shape[2] // c.v.shape[2]
    lse = scores.logsumexp(-1)
    if c.variant.sinks_N is not None:
        lse = torch.logaddexp(lse, c.variant.sinks_N.to(lse.dtype)[:, None])
    shares = (scores - lse[..., None]).exp().to(c.v.dtype)
    return torch.einsum("bnsl,blnd->bsnd", shares, c.v.repeat_interleave(n, 2)), lse.transpose(1, 2), ()


def _scores_backward(c: Call, do: Tensor, o: Tensor, lse: Tensor, _: State) -> tuple[Tensor, Tensor, Tensor]:
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


SCORES = Kernel("scores", lambda c: True, _scores, _scores_backward)
"""Materialised scores in plain torch: the twin of all other kernels."""

KERNELS = (
    Kernel("cached", lambda c: c.visibility.key_slots > 0 and c.plain, _cached),
    Kernel("parts", _parts_serve, _parts, _parts_backward),
    Kernel(
        "chunks", lambda c: c.visibility.context is not None and c.flash, _chunks, _chunks_backward
    ),
    Kernel(
        "documents",
        lambda c: c.flash and not c.visibility.key_slots and not (c.visibility.is_causal and c.plain),
        _documents, _documents_backward,
    ),
    Kernel("cudnn", _cudnn_serves, _cudnn, _cudnn_backward),
    Kernel("flash", lambda c: c.lse and c.flash, _flash_whole, _flash_whole_backward),
    Kernel("cpu", lambda c: c.lse and c.q.device.type == "cpu", _cpu, _cpu_backward),
    Kernel("torch", lambda c: not c.lse and c.variant.sinks_N is None, _torch),
    SCORES,
)  # fmt: skip
"""Kernels in order of preference: the first one that serves a call computes it."""


def kernel_of(call: Call) -> Kernel:
    """Select the kernel of a call, for forward and backward."""
    return next(kernel for kernel in KERNELS if kernel.serves(call))


def _gathering(visibility: Visibility, k_SBGD: Tensor, v_SBGD: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start to gather keys and values; the result waits for them [B, L, G, D]."""
    assert visibility.context is not None
    wait = visibility.context.whole(torch.cat([k_SBGD, v_SBGD], 2))

    def whole() -> tuple[Tensor, Tensor]:
        """Whole keys and values."""
        k, v = wait().transpose(0, 1).chunk(2, 2)
        return k, v

    return whole


def attend(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, visibility: Visibility, layer: int, variant: Variant = PLAIN
) -> Tensor:
    """Attention of `layer`: [S, B, N * Dv], in the layout and dtype of the query.

    New keys and values are written to the cache, if there is one, and gathered when ranks share the sequence.
    """
    k_SBGD, v_SBGD = visibility.remember(layer, k_SBGD, v_SBGD)
    call = Call(q_SBND.transpose(0, 1), k_SBGD.transpose(0, 1), v_SBGD.transpose(0, 1), visibility, variant)
    if _parts_serve(call) and not torch.is_grad_enabled():
        return _parts(call, _gathering(visibility, k_SBGD, v_SBGD))[0].transpose(0, 1).flatten(2)
    k_SBGD, v_SBGD = visibility.gather(k_SBGD, v_SBGD)
    call = replace(call, k=k_SBGD.transpose(0, 1), v=v_SBGD.transpose(0, 1))
    return kernel_of(call).forward(call)[0].transpose(0, 1).flatten(2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, variant: Variant = PLAIN
) -> tuple[Tensor, Tensor, State]:
    """(o [B, S, N, D], lse [B, S, N], state for `backward`) of q [B, S, N, D] over whole k and v [B, L, G, D]."""
    call = Call(q, k, v, visibility, variant, lse=True)
    return kernel_of(call).forward(call)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, state: State, visibility: Visibility,
    variant: Variant = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of this part; o and lse [B, S, N] may be those of a merged attention."""
    call = Call(q, k, v, visibility, variant, lse=True)
    kernel = kernel_of(call)
    assert kernel.backward is not None
    return kernel.backward(call, do, o, lse, state)
