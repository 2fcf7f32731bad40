"""`megatron_spec.ops.kernels.rows` and `ops.kernels.branch` in plain tensors, in the dtype they come in.

They let the fused unroll run on a CPU (`install`), and are what the kernels are compared with.

R rows, H hidden, M intermediate, N query and G key/value heads, D head size, T draft steps.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import kernels


def install(patch: pytest.MonkeyPatch) -> None:
    """This module in the place of both."""
    for name in ("rows", "branch"):
        patch.setitem(sys.modules, f"megatron_spec.ops.kernels.{name}", sys.modules[__name__])
        patch.setattr(kernels, name, sys.modules[__name__], raising=False)


def norm_forward(
    a_RH: Tensor,
    eps: float,
    b_RH: Tensor | None = None,
    sum_RH: Tensor | None = None,
    first: tuple[Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
) -> Tensor:
    x = a_RH
    if b_RH is not None:
        assert sum_RH is not None
        x = sum_RH.copy_(a_RH + b_RH)
    rstd = (x.square().mean(1) + eps).rsqrt()
    normed = x * rstd[:, None]
    if first is not None:
        first[1].copy_(normed * first[0])
    if second is not None:
        kept = torch.arange(len(x), device=x.device) if place_R is None else (place_R >= 0).nonzero()[:, 0]
        second[1][kept if place_R is None else place_R[kept].long()] = (normed * second[0])[kept]
    return rstd


def norm_partials(H: int, device: torch.device) -> Tensor:
    return torch.zeros(1, H, dtype=torch.float64, device=device)


def norm_backward(
    x_RH: Tensor,
    rstd_R: Tensor,
    dx_RH: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
    add_RH: Tensor | None = None,
) -> None:
    normed, g = x_RH * rstd_R[:, None], torch.zeros_like(x_RH)
    for (dy, w, dw), place in (
        *(((first, None),) if first is not None else ()),
        *(((second, place_R),) if second is not None else ()),
    ):
        if place is not None:
            padded = torch.cat([dy, dy.new_zeros(1, dy.shape[1])])
            dy = padded[place.long()]  # -1 is the row of zeros
        dw += (dy * normed).sum(0)
        g += dy * w
    if dx_RH is not None:
        dx = rstd_R[:, None] * (g - normed * (g * normed).mean(1, keepdim=True))
        dx_RH.copy_(dx if add_RH is None else dx + add_RH)


def _turn(x_RhD: Tensor, tables: tuple[Tensor, Tensor], sign: int) -> Tensor:
    cos, sin = (t[:, None].to(x_RhD.dtype) for t in tables)
    a, b = x_RhD.chunk(2, -1)
    return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], -1)


def rotary_forward(
    x_RX: Tensor, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int,
    e_EX: Tensor, place_R: Tensor | None = None,
) -> None:  # fmt: skip
    place = torch.arange(len(x_RX)) if place_R is None else place_R
    x = (x_RX + e_EX[place]).unflatten(1, (heads + 2 * kv_heads, -1))
    parts = x.split([heads, kv_heads, kv_heads], 1)
    for out, part in zip((q, k, v), (_turn(parts[0], tables, 1), _turn(parts[1], tables, 1), parts[2]), strict=True):
        out.copy_(part.flatten(1))


def rotary_backward(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], x_RX: Tensor, heads: int, kv_heads: int
) -> None:
    dq, dk, dv = (x.unflatten(1, (n, -1)).to(x_RX.dtype) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    x_RX.copy_(torch.cat([_turn(dq, tables, -1), _turn(dk, tables, -1), dv], 1).flatten(1))


def gated_forward(x_RX: Tensor, h_RM: Tensor) -> None:
    gate, up = x_RX.chunk(2, 1)
    h_RM.copy_(torch.nn.functional.silu(gate) * up)


def gated_backward(x_RX: Tensor, dh_RM: Tensor, h_RM: Tensor) -> None:
    gate, up = (x.clone() for x in x_RX.chunk(2, 1))
    gated_forward(x_RX, h_RM)
    sig = gate.sigmoid()
    x_RX.copy_(torch.cat([dh_RM * up * (sig + gate * sig * (1 - sig)), dh_RM * gate * sig], 1))


def _places(rows: int, B: int, place_R: Tensor | None) -> tuple[Tensor, Tensor]:
    place = torch.arange(rows) if place_R is None else place_R
    return place % B, place // B


def _scores(q_RX: Tensor, k_TRY: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Queries [R, N, D], scores [k, R, N]."""
    q, k = q_RX.unflatten(1, (-1, D)), k_TRY.unflatten(2, (-1, D))
    if len(k) == 0:  # of another number of rows when later steps have fewer
        return q, q.new_zeros(0, *q.shape[:2])
    k = k.repeat_interleave(q.shape[1] // k.shape[2], 2)
    return q, (q * k).sum(-1) * D**-0.5


def merge_forward(
    q_RX: Tensor, o0_BSND: Tensor, lse_BNS: Tensor, k_TRY: Tensor, v_TRY: Tensor, out_RX: Tensor,
    place_R: Tensor | None = None,
) -> None:  # fmt: skip
    B, _, N, D = o0_BSND.shape
    b, s = _places(len(q_RX), B, place_R)
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
    B, _, N, D = dq0_BSND.shape
    b, s = _places(len(q_RX), B, place_R)
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


def shifted_sum(x_NW: Tensor, R: int, later: int, steps: int, B: int, place_R: Tensor | None = None) -> Tensor:
    out = x_NW.new_zeros(R + (steps - 1) * B, x_NW.shape[1])
    out[:R] += x_NW[:R]
    place = torch.arange(R) if place_R is None else place_R.long()
    rows = (place >= 0).nonzero()[:, 0]
    for k in range(1, steps):
        out[rows + k * B] += x_NW[R + (k - 1) * later + place[rows]]
    return out
