"""Exact attention of the training-time test in memory linear in the sequence (EAGLE-3, arXiv 2503.01840).

At step k, row j looks at the trunk (keys of step 0 of rows <= j in its document) and at k branches (the keys of
steps 1..k of row j itself). Flash attention over the trunk gives (o0, lse0); a branch is one score per row, so
merging is arithmetic on rows:

    s_i = q . k_i / sqrt(D)      lse = logaddexp(lse0, s_1..s_k)      o = e^(lse0 - lse) o0 + sum_i e^(s_i - lse) v_i

From step 1 on only some rows are of interest (those still supervised), so queries and branches may come as a
compacted list of rows; they take their places among all rows for the trunk alone.

Backward: the trunk's own flash backward, given the *merged* o and lse, yields exactly the trunk's part of dq and
dk_0, dv_0 (as in ring attention, arXiv 2310.01889); branches are again row-local.

S rows, B batch, R compacted rows out of S * B, N query heads, G key/value heads, D head size, k branches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops import context_attention
from megatron_spec.ops.attention import Documents, cudnn_runs
from megatron_spec.ops.rows import pick_rows
from megatron_spec.runtime.context import ContextShard

_flash_cuda = torch.ops.aten._flash_attention_forward
_flash_cuda_backward = torch.ops.aten._flash_attention_backward
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class TrunkLayout:
    """Which trunk keys a row sees; made once per micro-batch and read by every step and layer.

    Attributes:
        bias_B1SS: 0 / -inf scores to add where several documents share a row (CPU path only); None means causal.
        starts: int32 [documents + 1] first row of every document in the flattened [B * S] rows, and B * S
            (CUDA path only, when several documents share a row).
        longest: number of rows of the longest document (CUDA path only).
        context: the ranks that share the sequence; queries and branches are then this rank's L rows, the trunk is
            whole, and the scores are [B, 1, L, S].
        chunks: which keys the chunks of this rank see (CUDA path only, under context parallelism).
    """

    bias_B1SS: Tensor | None = None
    starts: Tensor | None = None
    longest: int = 0
    context: ContextShard | None = None
    chunks: list[context_attention.Chunk] | None = None


def trunk_layout(
    documents_BS: Tensor, dtype: torch.dtype, context: ContextShard | None = None, single_document: bool | None = None
) -> TrunkLayout:
    """Layout for rows of several documents; causal when each row holds one (padding after it is harmless).

    Args:
        documents_BS: int document number of every row, -1 for padding; documents are contiguous.
        dtype: dtype of queries and keys.
        context: the ranks that share the sequence.
        single_document: every row holds one document, when that is known (finding out waits for the device).
    """
    if context is not None:
        if _flash_can_run(documents_BS.device, dtype, 64):
            return TrunkLayout(context=context, chunks=context_attention.chunks_of(documents_BS, context))
        seen = context_attention.visible(documents_BS, context)
        return TrunkLayout(bias_B1SS=context_attention.bias(seen, dtype), context=context)
    if int(documents_BS.max()) <= 0 if single_document is None else single_document:
        return TrunkLayout()
    B, S = documents_BS.shape
    if not _flash_can_run(documents_BS.device, dtype, 64):
        same = documents_BS[:, :, None] == documents_BS[:, None, :]
        causal = torch.ones(S, S, dtype=torch.bool, device=documents_BS.device).tril()
        bias = torch.zeros(B, S, S, dtype=dtype, device=documents_BS.device)
        return TrunkLayout(bias_B1SS=bias.masked_fill_(~(same & causal), -math.inf)[:, None])
    documents = Documents.of(documents_BS)
    return TrunkLayout(starts=documents.starts, longest=documents.longest)


def _flash_can_run(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def _wide(x: Tensor) -> torch.dtype:
    """dtype of row-local arithmetic: fp32, or fp64 when the input is fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# The trunk. All tensors here are [B, S, heads, D]; lse is [B, S, N] in fp32.


def _trunk(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o, lse, rng state of the kernel) of the causal trunk."""
    if q.device.type == "cpu":
        o, lse = _flash_cpu(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            0.0,
            layout.bias_B1SS is None,
            attn_mask=layout.bias_B1SS,
        )
        return o.transpose(1, 2), lse.transpose(1, 2), ()
    if not _flash_can_run(q.device, q.dtype, q.shape[-1]):
        return (*_plain_trunk(q, k, v, layout), ())
    if layout.chunks is not None:
        return context_attention.forward(q, k, v, layout.chunks)
    B, S, N, D = q.shape
    if layout.starts is None and cudnn_runs(q):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        o, lse, _, _, _, _, *rng, _ = _cudnn(*heads_first, None, True, 0.0, True, False)
        return o.transpose(1, 2), lse.view(B, N, S).transpose(1, 2), tuple(rng)
    if layout.starts is None:
        o, lse, *rng, _ = _flash_cuda(q, k, v, None, None, S, S, 0.0, True, False)
        return o, lse.transpose(1, 2), tuple(rng)
    flat = (x.reshape(B * S, -1, D) for x in (q, k, v))
    o, lse, *rng, _ = _flash_cuda(*flat, layout.starts, layout.starts, layout.longest, layout.longest, 0.0, True, False)
    return o.view(B, S, N, D), lse.view(N, B, S).permute(1, 2, 0), tuple(rng)


def _trunk_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rng: tuple[Tensor, ...], layout: TrunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the trunk's part, where o and lse are those of the merged attention."""
    if q.device.type == "cpu":
        heads_first = (x.transpose(1, 2) for x in (do, q, k, v, o, lse))
        grads = _flash_cpu_backward(*heads_first, 0.0, layout.bias_B1SS is None, attn_mask=layout.bias_B1SS)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv
    if not _flash_can_run(q.device, q.dtype, q.shape[-1]):
        return _plain_trunk_backward(do, q, k, v, o, lse, layout)
    if layout.chunks is not None:
        return context_attention.backward(do, q, k, v, o, lse, rng, layout.chunks)
    B, S, N, D = q.shape
    if layout.starts is None and cudnn_runs(q):
        heads_first = (x.transpose(1, 2) for x in (do, q, k, v, o))
        lse_BNS1 = lse.transpose(1, 2).contiguous()[..., None]
        grads = _cudnn_backward(*heads_first, lse_BNS1, *rng, None, None, None, S, S, 0.0, True)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv
    if layout.starts is None:
        lse_BNS = lse.transpose(1, 2).contiguous()
        return _flash_cuda_backward(do, q, k, v, o, lse_BNS, None, None, S, S, 0.0, True, *rng)
    flat = (x.reshape(B * S, -1, D) for x in (do, q, k, v, o))
    lse_NT = lse.permute(2, 0, 1).reshape(N, B * S).contiguous()
    L = layout.longest
    grads = _flash_cuda_backward(*flat, lse_NT, layout.starts, layout.starts, L, L, 0.0, True, *rng)
    dq, dk, dv = (x.view(B, S, -1, D) for x in grads)
    return dq, dk, dv


def trunk_forward(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o [B, S, N, D], lse [B, N, S], state of the kernel) of the trunk alone; all heads are [B, S, heads, D]."""
    o, lse, rng = _trunk(q, k, v, layout)
    return o, lse.transpose(1, 2).contiguous(), rng


def trunk_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse_BNS: Tensor,
    rng: tuple[Tensor, ...],
    layout: TrunkLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the trunk's part; o and lse [B, N, S] are those of the merged attention."""
    return _trunk_backward(do, q, k, v, o, lse_BNS.transpose(1, 2), rng, layout)


def _scores(q: Tensor, k: Tensor, layout: TrunkLayout) -> Tensor:
    """[B, N, S, S] masked scores: the fallback for GPUs in fp32 or odd head sizes, never used in real training."""
    n = q.shape[2] // k.shape[2]
    s = torch.einsum("bsnd,btnd->bnst", q, k.repeat_interleave(n, 2)).to(_wide(q)) / math.sqrt(q.shape[-1])
    if layout.starts is None and layout.bias_B1SS is None:
        causal = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return s.masked_fill(~causal, -math.inf)
    assert layout.bias_B1SS is not None, "layout was made for another dtype or head size"
    return s + layout.bias_B1SS


def _plain_trunk(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout) -> tuple[Tensor, Tensor]:
    s = _scores(q, k, layout)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().to(v.dtype)
    return torch.einsum("bnst,btnd->bsnd", p, v.repeat_interleave(q.shape[2] // v.shape[2], 2)), lse.transpose(1, 2)


def _plain_trunk_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, layout: TrunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    N, D = q.shape[2:]
    G = k.shape[2]
    p = (_scores(q, k, layout) - lse.transpose(1, 2)[..., None]).exp()
    dp = torch.einsum("bsnd,btnd->bnst", do, v.repeat_interleave(N // G, 2)).to(p.dtype)
    delta = (do * o).sum(-1, dtype=p.dtype).transpose(1, 2)
    ds = (p * (dp - delta[..., None]) / math.sqrt(D)).to(q.dtype)
    dq = torch.einsum("bnst,btnd->bsnd", ds, k.repeat_interleave(N // G, 2))
    dk = torch.einsum("bnst,bsnd->btnd", ds, q).unflatten(2, (G, -1)).sum(3)
    dv = torch.einsum("bnst,bsnd->btnd", p.to(do.dtype), do).unflatten(2, (G, -1)).sum(3)
    return dq, dk, dv


# The branches. Row-local: [..., N, D] queries and [..., G, D] keys and values, the leading axes being any rows.


def _grouped(x: Tensor, G: int) -> Tensor:
    """[..., N, D] -> [..., G, N / G, D]: query heads beside the key/value head they read."""
    return x.unflatten(-2, (G, -1))


def _merge(
    q: Tensor, o0: Tensor, lse0: Tensor, branches: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Merged (o [..., N, D], lse [..., N]) and the branch scores [..., N]."""
    wide, scale, G = _wide(q), 1 / math.sqrt(q.shape[-1]), branches[0][0].shape[-2]
    q_wide = _grouped(q, G).to(wide)
    scores = [(q_wide * k.unsqueeze(-2).to(wide)).sum(-1).flatten(-2) * scale for k, _ in branches]
    lse = torch.stack([lse0.to(wide), *scores]).logsumexp(0)
    o = o0.to(wide) * (lse0 - lse).exp()[..., None]
    o_grouped = _grouped(o, G)
    for s, (_, v) in zip(scores, branches, strict=True):
        o_grouped.addcmul_(_grouped((s - lse).exp()[..., None], G), v.unsqueeze(-2).to(wide))
    return o.to(q.dtype), lse, scores


def _branch_backward(
    do: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    scores: list[Tensor],
    branches: list[tuple[Tensor, Tensor]],
    dq: Tensor,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """dq with the branches' part added, and (dk_i, dv_i) of every branch."""
    wide, scale, G = _wide(q), 1 / math.sqrt(q.shape[-1]), branches[0][0].shape[-2]
    do_wide, q_wide = _grouped(do, G).to(wide), _grouped(q, G).to(wide)
    delta = (do_wide * _grouped(o, G)).sum(-1, keepdim=True)
    dq_wide = _grouped(dq, G).to(wide)
    grads = []
    for s, (k, v) in zip(scores, branches, strict=True):
        p = _grouped((s - lse).exp()[..., None], G)
        ds = p * ((do_wide * v.unsqueeze(-2)).sum(-1, keepdim=True) - delta) * scale
        dq_wide.addcmul_(ds, k.unsqueeze(-2).to(wide))  # dq is ours: fresh from the trunk
        grads.append(((ds * q_wide).sum(-2).to(k.dtype), (p * do_wide).sum(-2).to(v.dtype)))
    return dq_wide.flatten(-3, -2).to(q.dtype), grads


class _Places:
    """Moves compacted rows [R, ...] to their places among [B, S, ...] and back; with no rows given, the identity."""

    def __init__(self, rows_R: Tensor | None, shape_BS: tuple[int, int]) -> None:
        self.shape = shape_BS
        # rows count through [S, B], as activations are laid out
        self.index = None if rows_R is None else (rows_R % shape_BS[0], rows_R // shape_BS[0])

    def spread(self, x: Tensor) -> Tensor:
        """Zero elsewhere: such a query sees keys, but its output is not read and its gradient is zero."""
        if self.index is None:
            return x
        return x.new_zeros(*self.shape, *x.shape[1:]).index_put_(self.index, x)

    def collect(self, x: Tensor) -> Tensor:
        """Rows of a trunk result that are of interest."""
        return x if self.index is None else x[self.index]


class _MergedAttention(torch.autograd.Function):
    """Trunk and branches together; saves O(S k) numbers."""

    @staticmethod
    def forward(
        ctx: Any, layout: TrunkLayout, rows_R: Tensor | None, q: Tensor, k0: Tensor, v0: Tensor, *branches: Tensor
    ) -> Tensor:
        """See `merged_attention`."""
        pairs = list(zip(branches[::2], branches[1::2], strict=True))
        B, S = k0.shape[:2]
        places = _Places(rows_R, (B, S if layout.context is None else S // layout.context.size))
        o, lse, rng = _trunk(places.spread(q), k0, v0, layout)
        o, lse = places.collect(o), places.collect(lse)
        scores: list[Tensor] = []
        if pairs:
            o, lse, scores = _merge(q, o, lse, pairs)
        ctx.layout, ctx.places, ctx.num_branches, ctx.num_rng = layout, places, len(pairs), len(rng)
        ctx.save_for_backward(q, k0, v0, o, lse, *rng, *scores, *branches)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, trunk and branches."""
        q, k0, v0, o, lse, *rest = ctx.saved_tensors
        rng, scores = tuple(rest[: ctx.num_rng]), rest[ctx.num_rng : ctx.num_rng + ctx.num_branches]
        branches = rest[ctx.num_rng + ctx.num_branches :]
        do = do.contiguous() if do.stride(-1) != 1 else do
        spread = ctx.places.spread
        dq, dk0, dv0 = _trunk_backward(spread(do), spread(q), k0, v0, spread(o), spread(lse), rng, ctx.layout)
        dq = ctx.places.collect(dq)
        if not scores:
            return None, None, dq, dk0, dv0
        pairs = list(zip(branches[::2], branches[1::2], strict=True))
        dq, grads = _branch_backward(do, q, o, lse, scores, pairs, dq)
        return None, None, dq, dk0, dv0, *(g for pair in grads for g in pair)


def merged_attention(
    q_SBND: Tensor,
    trunk: tuple[Tensor, Tensor],
    branches: list[tuple[Tensor, Tensor]],
    layout: TrunkLayout,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Attention of one draft step.

    Args:
        q_SBND: rotated queries of this step; [R, 1, N, D] when rows are given.
        trunk: (k, v) [S, B, G, D] of step 0, keys rotated; whole also under context parallelism.
        branches: (k, v) [S, B, G, D] of steps 1..k; [R, 1, G, D] when rows are given.
        layout: from `trunk_layout`.
        rows_R: places of compacted queries and branches in the flattened [S * B] rows of this rank, distinct.

    Returns:
        [S, B, N * D] ([R, 1, N * D]), differentiable in every tensor.
    """
    flat = [x for pair in branches for x in pair]
    if rows_R is not None:
        flat = [x[:, 0] for x in (q_SBND, *flat)]
        out = _MergedAttention.apply(  # type: ignore[no-untyped-call]
            layout, rows_R, flat[0], *(x.transpose(0, 1) for x in trunk), *flat[1:]
        )
        return out.flatten(1)[:, None]
    rows_second = [x.transpose(0, 1) for x in (q_SBND, *trunk, *flat)]
    out = _MergedAttention.apply(layout, None, *rows_second)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).flatten(2)


class TrainingTimeTest:
    """The `Attention` a draft is given in training: remembers keys and values of earlier steps, per layer.

    Call it once per layer and step; the first call of a layer is the trunk, every later one adds a branch.
    With `detach`, gradients do not flow into keys and values of earlier steps.
    """

    def __init__(self, layout: TrunkLayout, detach: bool = False) -> None:
        self.layout = layout
        self.detach = detach
        self.rows_R: Tensor | None = None
        self.trunks: dict[int, tuple[Tensor, Tensor]] = {}
        self.branches: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def compact(self, rows_R: Tensor, kept_R: Tensor | None) -> None:
        """From the next step on, only `rows_R` of the flattened [S * B] rows come.

        Args:
            kept_R: their places among the rows of the step before; None when these are the same, or when no
                branch has been seen yet.
        """
        self.rows_R = rows_R
        if kept_R is not None:
            for seen in self.branches.values():
                seen[:] = [(pick_rows(k, kept_R), pick_rows(v, kept_R)) for k, v in seen]

    def __call__(self, layer: int, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        """Attention of the next step of `layer`: [S, B, N * D] ([R, 1, N * D] once compacted)."""
        if layer not in self.trunks:
            if self.layout.context is not None:  # once per micro-batch: all later steps look at the same trunk
                k_SBGD, v_SBGD = self.layout.context.gather(torch.cat([k_SBGD, v_SBGD], 2)).chunk(2, 2)
            self.trunks[layer], self.branches[layer] = (k_SBGD, v_SBGD), []
            return merged_attention(q_SBND, (k_SBGD, v_SBGD), [], self.layout)
        trunk, branches = self.trunks[layer], self.branches[layer]
        if self.detach:
            trunk = self.trunks[layer] = (trunk[0].detach(), trunk[1].detach())
            branches[:] = [(k.detach(), v.detach()) for k, v in branches]
        branches.append((k_SBGD, v_SBGD))
        return merged_attention(q_SBND, trunk, branches, self.layout, self.rows_R)
