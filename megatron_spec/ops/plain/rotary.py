"""Plain twins of `ops.kernels.rotary`.

R rows, N query heads, G key/value heads, D head size, X = (N + 2G) * D.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate(x_RhD: Tensor, tables: tuple[Tensor, Tensor], sign: int) -> Tensor:
    cos, sin = (t[:, None].to(x_RhD.dtype) for t in tables)
    a, b = x_RhD.chunk(2, -1)
    return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], -1)


def rotary_forward(
    x_RX: Tensor, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor | None, heads: int, kv_heads: int,
    e_EX: Tensor | None = None, place_R: Tensor | None = None, grouped: bool = False,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """`kernels.rotary.rotary_forward`."""
    if e_EX is not None:
        x_RX = x_RX + (e_EX[: len(x_RX)] if place_R is None else e_EX[place_R])
    if grouped:
        parts = x_RX.unflatten(1, (kv_heads, heads // kv_heads + 2, -1))
        q_RND, k_RGD, v_RGD = parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]
    else:
        x = x_RX.unflatten(1, (heads + 2 * kv_heads, -1))
        q_RND, k_RGD, v_RGD = x.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q_RND, k_RGD = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w
            for x, w in zip((q_RND, k_RGD), norms, strict=True)
        )
    q.copy_(_rotate(q_RND, tables, 1).flatten(1))
    k.copy_(_rotate(k_RGD, tables, 1).flatten(1))
    if v is not None:
        v.copy_(v_RGD.flatten(1))


def rotary_backward(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], x_RX: Tensor, heads: int, kv_heads: int,
    norms: tuple[Tensor, tuple[Tensor, Tensor], Tensor] | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """`kernels.rotary.rotary_backward`."""
    D, count = 2 * tables[0].shape[1], (heads, kv_heads, kv_heads)
    dq, dk, dv = (x.view(len(x), n, D).to(x_RX.dtype) for x, n in zip((q, k, v), count, strict=True))
    found = [_rotate(dq, tables, -1), _rotate(dk, tables, -1)]
    if norms is not None:
        before_RX, weights, partial = norms
        before = before_RX.unflatten(1, (-1, D)).split(count, 1)
        for i in range(2):
            rstd = (before[i].square().mean(-1, keepdim=True) + eps).rsqrt()
            normed, g = before[i] * rstd, found[i] * weights[i]
            partial[:, i * D : (i + 1) * D] += (found[i] * normed).sum((0, 1))
            found[i] = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    x_RX.copy_(torch.cat([*found, dv], 1).flatten(1))
