"""Softmax attention: one table of kernels (`attention_kernels.py`), selected by visibility and device.

S query rows, B batch, N query heads, G key/value heads (N a multiple of G), D head size, L key length.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_spec.ops import attention_kernels as kernels
from megatron_spec.ops.attention_kernels import PLAIN, Call, State, Variant
from megatron_spec.ops.visibility import Visibility

log = logging.getLogger(__name__)

Forward = Callable[[Call], tuple[Tensor, Tensor, State]]
Backward = Callable[[Call, Tensor, Tensor, Tensor, State], tuple[Tensor, Tensor, Tensor]]


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


def _flash_serves(c: Call) -> bool:
    """CUDA flash attention supports the dtype and the head size."""
    half = c.q.dtype in (torch.bfloat16, torch.float16)
    return c.q.is_cuda and half and c.q.shape[-1] % 8 == 0 and c.q.shape[-1] <= 256


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
        and _flash_serves(c)
        and c.visibility.is_causal
        and c.visibility.cache is None
        and c.q.shape[-1] in (64, 128)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and _cudnn_version() >= 91000
        and torch.cuda.get_device_capability(c.q.device) >= (9, 0)
    )


# ---- parts: context parallelism, one document per sequence


def _parts_serve(c: Call) -> bool:
    shared = c.visibility.context is not None and c.visibility.single
    return shared and c.plain and (_flash_serves(c) or c.q.device.type == "cpu")


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


SCORES = Kernel("scores", lambda c: True, kernels.scores, kernels.scores_backward)
"""Materialised scores in plain torch: the twin of all other kernels."""

KERNELS = (
    Kernel("cached", lambda c: c.visibility.key_slots > 0 and c.plain, kernels.cached),
    Kernel("parts", _parts_serve, _parts, _parts_backward),
    Kernel(
        "chunks", lambda c: c.visibility.context is not None and _flash_serves(c),
        kernels.chunks, kernels.chunks_backward,
    ),
    Kernel(
        "documents",
        lambda c: _flash_serves(c) and not c.visibility.key_slots and not (c.visibility.is_causal and c.plain),
        kernels.documents, kernels.documents_backward,
    ),
    Kernel("cudnn", _cudnn_serves, kernels.cudnn, kernels.cudnn_backward),
    Kernel("flash", lambda c: c.lse and _flash_serves(c), kernels.flash_whole, kernels.flash_whole_backward),
    Kernel("cpu", lambda c: c.lse and c.q.device.type == "cpu", kernels.cpu, kernels.cpu_backward),
    Kernel("torch", lambda c: not c.lse and c.variant.sinks_N is None, kernels.sdpa),
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
