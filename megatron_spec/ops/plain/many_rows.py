"""Plain twins of `ops.kernels.many_rows`.

R rows, H inputs, M intermediate, V columns of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.ops.plain.loss import largest
from megatron_spec.ops.plain.rows import gated_forward


def gated_product(x_RH: Tensor, weight_XH: Tensor, out_RM: Tensor, gate_up_RX: Tensor | None = None) -> None:
    """`kernels.many_rows.gated_product`."""
    gated_forward(torch.mm(x_RH, weight_XH.t(), out=gate_up_RX), out_RM)


def largest_product(
    x_RH: Tensor, weight_VH: Tensor, temperature: float, out_RV: Tensor, masses: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.many_rows.largest_product`."""
    return largest(torch.mm(x_RH, weight_VH.t(), out=out_RV), temperature)
