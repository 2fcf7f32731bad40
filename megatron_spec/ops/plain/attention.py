"""Plain twin of `ops.ttt_attention`: S x (k+1)S scores.

S rows, B batch, N query heads, D head size, k number of branches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ttt_mask(documents_BS: Tensor, branches: int) -> Tensor:
    """bool [B, S, (k+1) S]: causal inside the document for the trunk, the diagonal for every branch."""
    S = documents_BS.shape[1]
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    causal = torch.ones(S, S, dtype=torch.bool, device=same.device).tril()
    diagonal = torch.eye(S, dtype=torch.bool, device=same.device).expand_as(same)
    return torch.cat([same & causal] + [diagonal] * branches, dim=2)


def merged_attention(
    q_SBND: Tensor, trunk: tuple[Tensor, Tensor], branches: list[tuple[Tensor, Tensor]], documents_BS: Tensor
) -> Tensor:
    """Twin of `ttt_attention.merged_attention`: [S, B, N * D]."""
    n = q_SBND.shape[2] // trunk[0].shape[2]
    keys = torch.cat([trunk[0], *(k for k, _ in branches)]).repeat_interleave(n, 2)
    values = torch.cat([trunk[1], *(v for _, v in branches)]).repeat_interleave(n, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q_SBND, keys) / math.sqrt(q_SBND.shape[-1])
    scores = scores.masked_fill(~ttt_mask(documents_BS, len(branches))[:, None], -math.inf)
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values).flatten(2)
