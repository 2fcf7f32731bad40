"""Plain twin of `ops.kernels.teacher`.

R rows, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def teacher_rows(
    whole_RV: Tensor,
    target_ids_D: Tensor,
    draft_ids_V: Tensor,
    temperature: float,
    logits_RD: Tensor,
    argmax_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kernels.teacher.teacher_rows`."""
    logits_RD.copy_(whole_RV[:, target_ids_D])
    if argmax_R is None:
        argmax_R = whole_RV.argmax(1)
    id_R = draft_ids_V[argmax_R]
    inside_R = id_R >= 0
    lse_R = (logits_RD / temperature).logsumexp(1)
    return lse_R, argmax_R, torch.where(inside_R, id_R, logits_RD.argmax(1)), inside_R
