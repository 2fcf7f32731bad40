"""Embedding lookup in a table whose rows are split over the tensor parallel group.

S sequence, B micro-batch, H width, V (padded) vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup


def embed(tokens_BS: Tensor, weight: Tensor, tp: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[S, B, H] (or [S / TP, B, H] under sequence parallelism) embeddings from the shard `weight` [V / TP, H]."""
    if tp.size() == 1:
        return F.embedding(tokens_BS.t(), weight)
    rows = weight.shape[0]
    local_SB = tokens_BS.t() - tp.rank() * rows
    outside_SB = (local_SB < 0) | (local_SB >= rows)
    out_SBH = F.embedding(local_SB.masked_fill(outside_SB, 0), weight)
    out_SBH = out_SBH.masked_fill(outside_SB[..., None], 0.0)
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(out_SBH, group=tp)
    return reduce_from_tensor_model_parallel_region(out_SBH, group=tp)
