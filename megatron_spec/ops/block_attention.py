"""Attention of blocks of draft slots anchored to rows of a context (DFlash, arXiv 2602.06036).

A block of C slots starts at an anchor row. Each slot sees the context rows before the anchor, within the anchor's
document and, if given, a window, and the slots of its own block: all of them, or only the earlier ones. Blocks do not
see each other. Scores of rows x keys are materialised for a few blocks at a time, so memory is linear in the context;
the backward pass recomputes them.

P blocks, C slots, L context rows (all sequences concatenated), N query heads, G key/value heads, n = N / G,
D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_AT_ONCE = 256
"""Query rows whose scores are materialised at once in the plain version."""


@dataclass(frozen=True)
class BlockLayout:
    """Visibility of the slots of every block.

    Attributes:
        first_P: int64, first context row of the anchor's document. Non-decreasing.
        anchor_P: int64, context row of the anchor, which its block does not see. Ascending.
        causal: a slot sees the slots up to its own, not the complete block.
        window: a slot sees positions at most window - 1 before its own; None: all.
    """

    first_P: Tensor
    anchor_P: Tensor
    causal: bool = False
    window: int | None = None

    def masked(self, causal: bool, window: int | None) -> BlockLayout:
        """The same blocks under the mask of another layer."""
        return replace(self, causal=causal, window=window)

    def sees_context(self, part: slice, slots: int, first: int, end: int) -> Tensor:
        """bool [p, C, end - first]: the context rows that each slot of blocks `part` sees."""
        rows = torch.arange(first, end, device=self.anchor_P.device)
        anchor = self.anchor_P[part, None, None]
        seen = (rows >= self.first_P[part, None, None]) & (rows < anchor)
        if self.window is None:
            return seen.expand(-1, slots, -1)
        return seen & (rows > anchor + torch.arange(slots, device=rows.device)[:, None] - self.window)

    def sees_slots(self, slots: int) -> Tensor:
        """bool [C, C]: the slots of its own block that each slot sees."""
        ahead = torch.arange(slots, device=self.anchor_P.device)
        ahead = ahead[None, :] - ahead[:, None]  # how far a key slot is ahead of the query slot
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen if self.window is None else seen & (ahead > -self.window)

    def parts(self, slots: int) -> list[tuple[slice, int, int]]:
        """(blocks, first context row, end) of groups computed together."""
        first, anchor = self.first_P.tolist(), self.anchor_P.tolist()
        size = max(1, ROWS_AT_ONCE // slots)
        found = []
        for i in range(0, len(anchor), size):
            end = min(i + size, len(anchor))
            low = first[i] if self.window is None else max(first[i], anchor[i] - self.window + 1)
            found.append((slice(i, end), low, max(anchor[end - 1], low)))
        return found


def _grouped(x_pCND: Tensor, G: int) -> Tensor:
    """[p, C, N, D] -> [G, p, n, C, D]."""
    return x_pCND.unflatten(2, (G, -1)).permute(2, 0, 3, 1, 4)


def _ungrouped(x_GpnCD: Tensor) -> Tensor:
    return x_GpnCD.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _shares(
    q: Tensor, k: Tensor, keys: Tensor, layout: BlockLayout, part: slice, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Softmax weights of context rows [G, p, n, C, end - first] and own slots [G, p, n, C, C]; q is [G, p, n, C, D]."""
    G, _, _, C, D = q.shape
    context = (q.reshape(G, -1, D) @ keys.permute(1, 2, 0)).view(*q.shape[:-1], -1)
    own = q @ k.permute(2, 0, 3, 1)[:, :, None]
    seen = layout.sees_context(part, C, first, end)[None, :, None]
    scores = torch.cat([context.masked_fill(~seen, -math.inf), own.masked_fill(~layout.sees_slots(C), -math.inf)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = (scores.to(wide) / math.sqrt(D)).softmax(-1).to(scores.dtype)
    return shares[..., : end - first], shares[..., end - first :]


class _PlainBlockAttention(torch.autograd.Function):
    """See `block_attention`."""

    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[P, C, N, D]."""
        out, G = torch.empty_like(q), k.shape[2]
        for part, first, end in layout.parts(q.shape[1]):
            grouped = _grouped(q[part], G)
            context, own = _shares(grouped, k[part], keys[first:end], layout, part, first, end)
            o = own @ v[part].permute(2, 0, 1, 3)[:, :, None]
            o += (context.flatten(1, 3) @ values[first:end].transpose(0, 1)).view_as(o)
            out[part] = _ungrouped(o)
        ctx.layout = layout
        ctx.save_for_backward(q, k, v, keys, values, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values of the block, and keys and values of the context."""
        q, k, v, keys, values, out = ctx.saved_tensors
        layout, G, scale = ctx.layout, k.shape[2], 1 / math.sqrt(q.shape[-1])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for part, first, end in layout.parts(q.shape[1]):
            qg, dog = _grouped(q[part], G), _grouped(do[part], G)
            context, own = _shares(qg, k[part], keys[first:end], layout, part, first, end)
            delta = (dog * _grouped(out[part], G)).sum(-1, keepdim=True)
            slots_v, slots_k = (x[part].permute(2, 0, 1, 3)[:, :, None] for x in (v, k))
            ds_own = own * (dog @ slots_v.transpose(-1, -2) - delta) * scale
            rows = dog.flatten(1, 3)
            dp = (rows @ values[first:end].permute(1, 2, 0)).view_as(context)
            ds = (context * (dp - delta) * scale).flatten(1, 3)
            dkeys[first:end] += (ds.transpose(1, 2) @ qg.flatten(1, 3)).transpose(0, 1)
            dvalues[first:end] += (context.flatten(1, 3).transpose(1, 2) @ rows).transpose(0, 1)
            dq[part] = _ungrouped(ds_own @ slots_k + (ds @ keys[first:end].transpose(0, 1)).view_as(qg))
            dk[part] = (ds_own.transpose(-1, -2) @ qg).sum(2).permute(1, 2, 0, 3)
            dv[part] = (own.transpose(-1, -2) @ dog).sum(2).permute(1, 2, 0, 3)
        return None, dq, dk, dv, dkeys, dvalues


def block_attention(
    q_PCND: Tensor,
    k_PCGD: Tensor,
    v_PCGD: Tensor,
    keys_LGD: Tensor,
    values_LGD: Tensor,
    layout: BlockLayout,
    triton: bool = False,
) -> Tensor:
    """Attention of every slot: [P, C, N * D], differentiable in every tensor.

    Args:
        q_PCND: queries of the slots, rotated.
        k_PCGD, v_PCGD: keys (rotated) and values of the slots.
        keys_LGD, values_LGD: keys (rotated) and values of the context.
        triton: use the Triton kernels (half precision on a GPU), which have tiles for head sizes 64 and 128.
    """
    if triton and q_PCND.shape[-1] in (64, 128):
        from megatron_spec.ops.kernels.block import attention

        return attention(q_PCND, k_PCGD, v_PCGD, keys_LGD, values_LGD, layout).flatten(2)
    out: Tensor = _PlainBlockAttention.apply(  # type: ignore[no-untyped-call]
        layout, q_PCND, k_PCGD, v_PCGD, keys_LGD, values_LGD
    )
    return out.flatten(2)
