"""Embedding lookup in a table whose rows are sharded over the TP group.

S sequence, B micro-batch, H width, V (padded) vocabulary, TP tensor-parallel size.
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
    """Refuse ids outside the table; on a GPU by a device-side assertion, without synchronisation.

    Raises:
        UserError: naming the first such id (on a CPU).
    """
    outside_BS = (tokens_BS < 0) | (tokens_BS >= vocab_size)
    message = f"found token ids outside of the vocabulary of {vocab_size}"
    try:
        torch._assert_async(~outside_BS.any(), message)
    except RuntimeError as error:
        if message not in str(error):
            raise
        raise UserError(
            f"found token id {int(tokens_BS[outside_BS][0])}, expected ids from 0 to {vocab_size - 1}, the rows of the "
            "embedding: use the base's tokenizer, and data tokenised with it"
        ) from None


def embed(
    tokens_BS: Tensor, weight: Tensor, tp: ProcessGroup, sequence_parallel: bool, vocab_size: int, known: bool = False
) -> Tensor:
    """[S, B, H] (or [S / TP, B, H] under sequence parallelism) embeddings from the shard `weight` [V / TP, H].

    Args:
        vocab_size: rows of all ranks without padding. The last ranks may have padding or fewer rows.
        known: the ids are known to be in the table, and are not checked.

    Raises:
        UserError: an id outside the table (see `check_ids`).
    """
    if not known:
        check_ids(tokens_BS, vocab_size)
    if tp.size() == 1:
        return F.embedding(tokens_BS.t(), weight)
    rows = weight.shape[0]
    local_SB = tokens_BS.t() - tp.rank() * max(rows, -(-vocab_size // tp.size()))
    outside_SB = (local_SB < 0) | (local_SB >= rows)
    out_SBH = F.embedding(local_SB.masked_fill(outside_SB, 0), weight)
    out_SBH = out_SBH.masked_fill(outside_SB[..., None], 0.0)
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(out_SBH, group=tp)
    return reduce_from_tensor_model_parallel_region(out_SBH, group=tp)
