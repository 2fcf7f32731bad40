"""Plain twins of `ops.kernels.branch`.

S rows, B batch, R flattened rows, N query heads, G key/value heads, D head size, T draft steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _places(rows: int, B: int, place_R: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    place = torch.arange(rows, device=device) if place_R is None else place_R
    return place % B, place // B


def _scores(q_RX: Tensor, k_TRY: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Queries [R, N, D], scores [k, R, N]."""
    q, k = q_RX.unflatten(1, (-1, D)), k_TRY.unflatten(2, (-1, D))
    if len(k) == 0:  # its number of rows may differ, when later steps have fewer
        return q, q.new_zeros(0, *q.shape[:2])
    k = k.repeat_interleave(q.shape[1] // k.shape[2], 2)
    return q, (q * k).sum(-1) * D**-0.5


def merge_forward(
    q_RX: Tensor, o0_BSND: Tensor, lse_BNS: Tensor, k_TRY: Tensor, v_TRY: Tensor, out_RX: Tensor,
    place_R: Tensor | None = None,
) -> None:  # fmt: skip
    """`kernels.branch.merge_forward`."""
    B, _, N, D = o0_BSND.shape
    b, s = _places(len(q_RX), B, place_R, q_RX.device)
    _, scores = _scores(q_RX, k_TRY, D)
    trunk = lse_BNS[b, :, s]
    lse = torch.cat([trunk[None], scores]).logsumexp(0)
    out = o0_BSND[b, s] * (trunk - lse).exp()[..., None]
    for score, v_RY in zip(scores, v_TRY, strict=True):
        v = v_RY.unflatten(1, (-1, D))
        out += (score - lse).exp()[..., None] * v.repeat_interleave(N // v.shape[1], 1)
    out_RX.copy_(out.flatten(1))
    lse_BNS[b, :, s] = lse


def merge_backward(
    q_RX: Tensor, o_RX: Tensor, do_RX: Tensor, lse_BNS: Tensor, k_TRY: Tensor, v_TRY: Tensor, dq0_BSND: Tensor,
    dq_RX: Tensor, dk_TRY: Tensor, dv_TRY: Tensor, first: bool, place_R: Tensor | None = None,
) -> None:  # fmt: skip
    """`kernels.branch.merge_backward`."""
    B, _, N, D = dq0_BSND.shape
    b, s = _places(len(q_RX), B, place_R, q_RX.device)
    q, scores = _scores(q_RX, k_TRY, D)
    do, o = (x.unflatten(1, (N, D)) for x in (do_RX, o_RX))
    dq = dq0_BSND[b, s].clone()
    for i, score in enumerate(scores):
        k, v = (x[i].unflatten(1, (-1, D)) for x in (k_TRY, v_TRY))
        G = k.shape[1]
        p = (score - lse_BNS[b, :, s]).exp()
        ds = p * ((do * v.repeat_interleave(N // G, 1)).sum(-1) - (do * o).sum(-1)) * D**-0.5
        dq += ds[..., None] * k.repeat_interleave(N // G, 1)
        for total, part in ((dk_TRY, ds[..., None] * q), (dv_TRY, p[..., None] * do)):
            found = part.unflatten(1, (G, -1)).sum(2).flatten(1)
            total[i] = found if first else total[i] + found
    dq_RX.copy_(dq.flatten(1))
