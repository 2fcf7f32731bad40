"""Exact attention of the training-time test in memory linear in the sequence (EAGLE-3, arXiv 2503.01840).

At step k, row j sees the trunk (keys of step 0 of rows <= j in its document) and k branches (the keys of
steps 1..k of row j itself). Flash attention over the trunk gives (o0, lse0); a branch is one score per row, so
merging is arithmetic on rows:

    s_i = q . k_i / sqrt(D)      lse = logaddexp(lse0, s_1..s_k)      o = e^(lse0 - lse) o0 + sum_i e^(s_i - lse) v_i

From step 1 on only some rows matter (those still supervised), so queries and branches may be a compacted list of rows;
only the trunk attention scatters them to their positions among all rows.

Backward: the trunk's own flash backward, given the *merged* o and lse, yields exactly the trunk's part of dq and
dk_0, dv_0 (as in ring attention, arXiv 2310.01889); branches are again row-local.

S rows, B batch, R compacted rows out of S * B, N query heads, G key/value heads, D head size, k branches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_spec.ops import attention
from megatron_spec.ops.rows import pick_rows
from megatron_spec.ops.visibility import Visibility


def _wide(x: Tensor) -> torch.dtype:
    """dtype of row-local arithmetic: fp32, or fp64 when the input is fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# The branches. Row-local: [..., N, D] queries and [..., G, D] keys and values, the leading axes being any rows.


def _grouped(x: Tensor, G: int) -> Tensor:
    """[..., N, D] -> [..., G, N / G, D]: query heads grouped by the key/value head they read."""
    return x.unflatten(-2, (G, -1))


def _merge(
    q: Tensor, o0: Tensor, lse0: Tensor, branches: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Merged o [..., N, D] and lse [..., N], and the branch scores [..., N]."""
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
        dq_wide.addcmul_(ds, k.unsqueeze(-2).to(wide))  # in place: dq is a new tensor from the trunk
        grads.append(((ds * q_wide).sum(-2).to(k.dtype), (p * do_wide).sum(-2).to(v.dtype)))
    return dq_wide.flatten(-3, -2).to(q.dtype), grads


class _Places:
    """Scatters compacted rows [R, ...] to positions in [B, S, ...] and back; the identity without rows."""

    def __init__(self, rows_R: Tensor | None, shape_BS: tuple[int, int]) -> None:
        self.shape = shape_BS
        # rows index the flattened [S, B], the layout of activations
        self.index = None if rows_R is None else (rows_R % shape_BS[0], rows_R // shape_BS[0])

    def spread(self, x: Tensor) -> Tensor:
        """Scatter rows, zero elsewhere: the output of a zero query is not read and its gradient is zero."""
        if self.index is None:
            return x
        return x.new_zeros(*self.shape, *x.shape[1:]).index_put_(self.index, x)

    def collect(self, x: Tensor) -> Tensor:
        """Select the compacted rows of a trunk result."""
        return x if self.index is None else x[self.index]


class _MergedAttention(torch.autograd.Function):
    """Trunk and branches together; saves O(S k) values."""

    @staticmethod
    def forward(
        ctx: Any, visibility: Visibility, variant: attention.Variant, rows_R: Tensor | None, q: Tensor, k0: Tensor,
        v0: Tensor, *branches: Tensor,
    ) -> Tensor:  # fmt: skip
        """See `merged_attention`."""
        pairs = list(zip(branches[::2], branches[1::2], strict=True))
        B, S = k0.shape[:2]
        places = _Places(rows_R, (B, S if visibility.context is None else S // visibility.context.size))
        o, lse, rng = attention.forward(places.spread(q), k0, v0, visibility, variant)
        o, lse = places.collect(o), places.collect(lse)
        scores: list[Tensor] = []
        if pairs:
            o, lse, scores = _merge(q, o, lse, pairs)
        ctx.visibility, ctx.variant, ctx.places = visibility, variant, places
        ctx.num_branches, ctx.num_rng = len(pairs), len(rng)
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
        dq, dk0, dv0 = attention.backward(
            spread(do), spread(q), k0, v0, spread(o), spread(lse), rng, ctx.visibility, ctx.variant
        )
        dq = ctx.places.collect(dq)
        if not scores:
            return None, None, None, dq, dk0, dv0
        pairs = list(zip(branches[::2], branches[1::2], strict=True))
        dq, grads = _branch_backward(do, q, o, lse, scores, pairs, dq)
        return None, None, None, dq, dk0, dv0, *(g for pair in grads for g in pair)


def merged_attention(
    q_SBND: Tensor,
    trunk: tuple[Tensor, Tensor],
    branches: list[tuple[Tensor, Tensor]],
    visibility: Visibility,
    rows_R: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of one draft step.

    Args:
        q_SBND: rotated queries of this step; [R, 1, N, D] when rows are given.
        trunk: (k, v) [S, B, G, D] of step 0, keys rotated; whole even under context parallelism.
        branches: (k, v) [S, B, G, D] of steps 1..k; [R, 1, G, D] when rows are given.
        visibility: visibility of trunk keys for the rows of a step.
        rows_R: positions of compacted queries and branches in the flattened [S * B] rows of this rank, distinct.
        window: keys that a query sees, including branches; None: all. At least one of them is a trunk key.

    Returns:
        [S, B, N * D] ([R, 1, N * D]), differentiable in every tensor.
    """
    flat = [x for pair in branches for x in pair]
    variant = attention.PLAIN if window is None else attention.Variant(window=window - len(branches))
    if rows_R is not None:
        flat = [x[:, 0] for x in (q_SBND, *flat)]
        out = _MergedAttention.apply(  # type: ignore[no-untyped-call]
            visibility, variant, rows_R, flat[0], *(x.transpose(0, 1) for x in trunk), *flat[1:]
        )
        return out.flatten(1)[:, None]
    rows_second = [x.transpose(0, 1) for x in (q_SBND, *trunk, *flat)]
    out = _MergedAttention.apply(visibility, variant, None, *rows_second)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).flatten(2)


class TrainingTimeTest:
    """The `Attention` of a draft in training: keeps keys and values of earlier steps per layer.

    Call it once per layer and step; the first call of a layer is the trunk, every later one adds a branch.
    With `detach`, gradients do not flow into keys and values of earlier steps. With a window, row j at step k sees
    k branches, including its own, and the last window - k trunk rows, as in decoding.
    """

    def __init__(self, visibility: Visibility, detach: bool = False, window: int | None = None) -> None:
        self.visibility = visibility
        self.detach, self.window = detach, window
        self.rows_R: Tensor | None = None
        self.trunks: dict[int, tuple[Tensor, Tensor]] = {}
        self.branches: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def compact(self, rows_R: Tensor, kept_R: Tensor | None) -> None:
        """Restrict later steps to `rows_R` of the flattened [S * B] rows.

        Args:
            kept_R: their positions among the rows of the previous step; None when the rows are unchanged, or when
                there is no branch yet.
        """
        self.rows_R = rows_R
        if kept_R is not None:
            for seen in self.branches.values():
                seen[:] = [(pick_rows(k, kept_R), pick_rows(v, kept_R)) for k, v in seen]

    def __call__(self, layer: int, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        """Attention of the next step of `layer`: [S, B, N * D] ([R, 1, N * D] once compacted)."""
        if layer not in self.trunks:
            k_SBGD, v_SBGD = self.visibility.gather(
                k_SBGD, v_SBGD
            )  # gathered once: all later steps read the same trunk
            self.trunks[layer], self.branches[layer] = (k_SBGD, v_SBGD), []
            return merged_attention(q_SBND, (k_SBGD, v_SBGD), [], self.visibility, window=self.window)
        trunk, branches = self.trunks[layer], self.branches[layer]
        if self.detach:
            trunk = self.trunks[layer] = (trunk[0].detach(), trunk[1].detach())
            branches[:] = [(k.detach(), v.detach()) for k, v in branches]
        branches.append((k_SBGD, v_SBGD))
        return merged_attention(q_SBND, trunk, branches, self.visibility, self.rows_R, self.window)
