"""Plain twin of `ops.kernels.adam`."""

from __future__ import annotations

from torch import Tensor


def adamw(
    grad: Tensor, master: Tensor, moments: tuple[Tensor, Tensor], out: Tensor, scale: float, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """`kernels.adam.adamw`."""
    g, (m, v) = grad * scale, moments
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
    master.mul_(1 - lr * weight_decay).sub_(lr / (1 - betas[0] ** step) * m / root)
    out.copy_(master)
