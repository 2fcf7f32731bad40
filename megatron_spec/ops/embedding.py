"""Embedding lookup in a table whose rows are split over the tensor parallel group.

S sequence, B micro-batch, H width, V (padded) vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_spec.config import UserError


def check_ids(tokens_BS: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the table; on a GPU by an assertion on the device, without a synchronisation.

    Raises:
        UserError: naming the first such id (on a CPU).
    """
    outside_BS = (tokens_BS < 0) | (tokens_BS >= vocab_size)
    said = f"found token ids outside of the vocabulary of {vocab_size}"
    try:
        torch._assert_async(~outside_BS.any(), said)
    except RuntimeError as error:
        if said not in str(error):
            raise
        raise UserError(
            f"found token id {int(tokens_BS[outside_BS][0])}, expected ids from 0 to {vocab_size - 1}, the rows of the "
            "embedding: use the tokenizer that belongs to the base, and data that was tokenised with it"
        ) from None


def embed(
    tokens_BS: Tensor, weight: Tensor, tp: ProcessGroup, sequence_parallel: bool, vocab_size: int | None = None
) -> Tensor:
    """[S, B, H] (or [S / TP, B, H] under sequence parallelism) embeddings from the shard `weight` [V / TP, H].

    Args:
        vocab_size: rows over all ranks without padding; default: with it.

    Raises:
        UserError: an id that is outside (see `check_ids`).
    """
    check_ids(tokens_BS, vocab_size or weight.shape[0] * tp.size())
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
