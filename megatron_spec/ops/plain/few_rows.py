"""Plain twin of `ops.kernels.few_rows`, with its letters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def few_rows_product(
    x_RH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, norm_H: Tensor | None = None,
    eps: float = 0.0, gated: bool = False, rest_RO: Tensor | None = None,
    second: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.few_rows.few_rows_product`."""
    inputs = [
        x if norm is None else x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * norm
        for x, norm in ((x_RH, norm_H), *((second,) if second is not None else ()))
    ]
    out = torch.cat(inputs, 1) @ torch.cat(list(weights)).t()
    out = out if biases is None else out + torch.cat(list(biases))
    if gated:
        gate, up = out.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return out if rest_RO is None else rest_RO + out
