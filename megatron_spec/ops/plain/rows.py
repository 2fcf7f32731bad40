"""Plain twins of `ops.kernels.rows`.

R rows, H hidden, M intermediate, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_forward(
    a_RH: Tensor,
    eps: float,
    b_RH: Tensor | None = None,
    sum_RH: Tensor | None = None,
    first: tuple[Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
) -> Tensor:
    """`kernels.rows.norm_forward`."""
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
    """`kernels.rows.norm_partials`."""
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
    """`kernels.rows.norm_backward`."""
    normed, g = x_RH * rstd_R[:, None], torch.zeros_like(x_RH)
    for (dy, w, dw), place in (
        *(((first, None),) if first is not None else ()),
        *(((second, place_R),) if second is not None else ()),
    ):
        if place is not None:
            padded = torch.cat([dy, dy.new_zeros(1, dy.shape[1])])
            dy = padded[place.long()]  # -1 selects the row of zeros
        dw += (dy * normed).sum(0)
        g += dy * w
    if dx_RH is not None:
        dx = rstd_R[:, None] * (g - normed * (g * normed).mean(1, keepdim=True))
        dx_RH.copy_(dx if add_RH is None else dx + add_RH)


def gated_forward(x_RX: Tensor, h_RM: Tensor) -> None:
    """`kernels.rows.gated_forward`."""
    gate, up = x_RX.chunk(2, 1)
    h_RM.copy_(torch.nn.functional.silu(gate) * up)


def gated_backward(x_RX: Tensor, dh_RM: Tensor, h_RM: Tensor) -> None:
    """`kernels.rows.gated_backward`."""
    gate, up = (x.clone() for x in x_RX.chunk(2, 1))
    gated_forward(x_RX, h_RM)
    sig = gate.sigmoid()
    x_RX.copy_(torch.cat([dh_RM * up * (sig + gate * sig * (1 - sig)), dh_RM * gate * sig], 1))


def shifted_sum(
    x_NW: Tensor, R: int, later: int, steps: int, B: int, place_P: Tensor | None = None, first_P: Tensor | None = None
) -> Tensor:
    """`kernels.rows.shifted_sum`."""
    identity = torch.arange(R, device=x_NW.device)
    places = [identity if place is None else place.long() for place in (first_P, *[place_P] * (steps - 1))]
    out = x_NW.new_zeros(len(places[0]) + (steps - 1) * B, x_NW.shape[1])
    for k, place in enumerate(places):
        rows = (place >= 0).nonzero()[:, 0]
        start = 0 if k == 0 else R + (k - 1) * later
        out[rows + k * B] += x_NW[start + place[rows]]
    return out


def scale_(x: Tensor, scale: Tensor) -> Tensor:
    """`kernels.rows.scale_`."""
    return x.mul_(scale.to(x.dtype))
