"""The two ends of the frozen base, embedding and head, as functions over this rank's vocabulary shard.

S sequence, B micro-batch, H hidden, V padded vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_spec.ops.embedding import embed

__all__ = ["embed", "logits"]


def logits(state_SBH: Tensor, weight: Tensor, vocab_size: int, tp: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[S, B, V / TP] logits of this rank's rows of the head; padding rows are -inf.

    Differentiable in the state (the gradient is summed over tensor parallel ranks), as drafts that train through
    the frozen head need.
    """
    if sequence_parallel:
        state_SBH = gather_from_sequence_parallel_region(state_SBH, tensor_parallel_output_grad=True, group=tp)
    else:
        state_SBH = copy_to_tensor_model_parallel_region(state_SBH, group=tp)
    out = F.linear(state_SBH, weight)
    real_rows = min(max(vocab_size - tp.rank() * weight.shape[0], 0), weight.shape[0])
    if real_rows < weight.shape[0]:
        out[..., real_rows:] = float("-inf")
    return out
