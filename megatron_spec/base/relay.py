"""The tensor sent between two stages: the hidden state followed by the captures.

S sequence (this rank's part under sequence parallelism), B micro-batch, H hidden, k captures so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shapes = list[tuple[int, ...]]


def join(hidden_SBH: Tensor, captures: Sequence[Tensor]) -> Tensor:
    """[S, B, H * (1 + k)]: hidden state, then the captures in ascending layer order."""
    return torch.cat([hidden_SBH, *captures], dim=-1) if captures else hidden_SBH


def split(relayed: Tensor, hidden_size: int) -> tuple[Tensor, list[Tensor]]:
    """Inverse of `join`: hidden state [S, B, H] and k captures [S, B, H]."""
    hidden, *captures = relayed.split(hidden_size, dim=-1)
    return hidden.contiguous(), captures


def shapes_adjuster(captures_in: int, captures_out: int) -> Callable[[Shapes, Shapes], tuple[Shapes, Shapes]]:
    """megatron-core's `adjust_tensor_shapes_fn`: widen the received and sent shapes by their captures."""

    def adjust(receive: Shapes, send: Shapes) -> tuple[Shapes, Shapes]:
        """Shapes with room for the captures of earlier stages."""

        def widen(shapes: Shapes, captures: int) -> Shapes:
            """Shapes whose last dimension also holds this many captures."""
            return [(*shape[:-1], shape[-1] * (1 + captures)) for shape in shapes]

        return widen(receive, captures_in), widen(send, captures_out)

    return adjust
