"""Sums over tensor parallel ranks that run while other rows are computed.

A sharded layer ends with a sum over ranks that the next operation needs. With its rows in two pieces, the sum of one
piece runs on the network while the other piece is multiplied. Products of half the rows cost more, so where other
products wait to be computed, the weight gradients of a backward, the sum of all rows runs beside those instead.

R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

SMALLEST_PIECE = 1024
"""Rows of a piece below which two products cost more than the sum that they hide."""
_MULTIPLE = 256
"""Pieces begin at multiples of this, tiles of a product."""

Wait = Callable[[], Tensor]
"""Waits for a sum and returns it; may be called again."""


class RankSums:
    """Sums over the ranks that share a layer.

    Attributes:
        beside_gradients: weight gradients are computed while sums run, else, with fewer products, after several steps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.beside_gradients = group, group.size() > 1

    def pieces(self, rows: int) -> list[slice]:
        """The rows in one piece, or in two where several ranks sum enough rows."""
        if self.group.size() == 1 or rows < 2 * SMALLEST_PIECE:
            return [slice(0, rows)]
        multiple = min(_MULTIPLE, SMALLEST_PIECE)
        middle = rows // 2 // multiple * multiple
        return [slice(0, middle), slice(middle, rows)]

    def start(self, x: Tensor) -> Wait:
        """Start to sum x over the group, in place; x must not be used before the result was called.

        Ranks call it in the same order, with equal shapes.
        """
        if self.group.size() == 1:
            return lambda: x
        work = dist.all_reduce(x, group=self.group, async_op=True)

        def wait() -> Tensor:
            """The sum."""
            work.wait()
            return x

        return wait
