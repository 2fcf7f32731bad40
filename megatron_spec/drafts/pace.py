"""D-PACE: weights of the steps of a proposal by their part in the accepted length (docs/algorithms.md#losses).

N rows of all steps, P proposals, T draft steps, R rows of a chunk, D this rank's shard of the draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_spec.losses import block
from megatron_spec.losses.vocab_parallel import Largest, Teacher
from megatron_spec.ops.head import Weigh


class Pace:
    """Weights of the rows of a chunk, which has all steps of its proposals.

    Args:
        places: (proposal, step) of every row, [N] each.
        shape: (P, T).
        alpha: how far acceptance probabilities are smoothed towards 1.
        counted_N: 1 for rows whose acceptance counts, else 0: such rows weigh nothing; fp32 or fp64.
    """

    def __init__(self, places: tuple[Tensor, Tensor], shape: tuple[int, int], alpha: float, counted_N: Tensor) -> None:
        self.places, self.alpha = places, alpha
        self.q_PT, self.counted_PT = (counted_N.new_zeros(shape) for _ in range(2))
        self.counted_PT[places] = counted_N

    def weights(self, q_R: Tensor, part: slice = slice(None)) -> Tensor:
        """[R] weights of the rows `part` from their acceptance probabilities."""
        places = self.places[0][part], self.places[1][part]
        self.q_PT[places] = q_R.to(self.q_PT.dtype)
        return block.pace_weights(self.q_PT, self.counted_PT, self.alpha)[places]

    def weigh(
        self, teacher: Teacher, temperature: float, group: dist.ProcessGroup | None, kernels: Any = None
    ) -> Weigh:
        """For `ops.head.fused_head`: a row is accepted with the draft's probability of the base's most likely token; 0
        where the draft vocabulary lacks it.

        Args:
            kernels: of `losses.block.label_probabilities`.
        """

        def weights_of(logits_RD: Tensor, rows_R: Tensor, part: slice, known: Largest | None = None) -> Tensor:
            """See `Weigh`."""
            q_R = block.label_probabilities(logits_RD, teacher, rows_R, temperature, group, kernels, known)
            return self.weights(q_R, part)

        return weights_of
