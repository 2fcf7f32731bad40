"""Sums over tensor parallel ranks that run while other rows are computed.

A sharded layer ends with a sum over ranks that the next operation needs. With its rows in two pieces, the sum of one
piece runs on the network while the other piece is multiplied. NCCL's kernels take processors from the products
meanwhile; two GPUs of one host can exchange their parts by copy engines instead (`peer_memory.py`).

R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_spec.ops import peer_memory
from megatron_spec.planning.paths import Paths

SMALLEST_PIECE = 1024
"""Rows of a piece below which two products cost more than the sum that they hide."""
_MULTIPLE = 256
"""Pieces begin at multiples of this, tiles of a product."""
SMALLEST_COPY = 1 << 20
"""Bytes of a sum below which an all-reduce is quicker than copies into the peer's memory."""

Wait = Callable[[], Tensor]
"""Waits for a sum and returns it; may be called again."""


class PeerLink(Protocol):
    """Slots in the memory of each of two ranks, into which the other one copies."""

    slots: int
    slot_bytes: int

    def send(self, slot: int, x: Tensor) -> None:
        """Start to copy x (contiguous, at most `slot_bytes`) into the peer's slot, once the peer has released it."""

    def received(self, slot: int, like: Tensor) -> Tensor:
        """What the peer copied into this rank's slot, in the shape and dtype of `like`. What was sent from this rank
        has left, too."""

    def release(self, slot: int) -> None:
        """The last read of this rank's slot was enqueued: the peer may copy into it again."""


class RankSums:
    """Sums over the ranks that share a layer.

    Args:
        connect: opens the link of two ranks at the first sum that is large enough for it (collective); it may return
            None. Without it, all sums are all-reduces of the group.
    """

    def __init__(self, group: dist.ProcessGroup, connect: Callable[[Tensor], PeerLink | None] | None = None) -> None:
        self.group, self._connect = group, connect
        self._link: PeerLink | None = None
        self._free: list[int] = []

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
        slots = self._slots_for(x)
        return self._all_reduce(x) if slots is None else self._exchange(x, slots)

    def _all_reduce(self, x: Tensor) -> Wait:
        work = dist.all_reduce(x, group=self.group, async_op=True)

        def wait() -> Tensor:
            """The sum."""
            work.wait()
            return x

        return wait

    def _slots_for(self, x: Tensor) -> list[int] | None:
        """Free slots for all of x, equal on both ranks; None: too small, too large, or no link."""
        size = x.numel() * x.element_size()
        if (self._connect is None and self._link is None) or size < SMALLEST_COPY or not x.is_contiguous():
            return None
        if self._connect is not None:
            self._link, self._connect = self._connect(x), None
            self._free = [] if self._link is None else list(range(self._link.slots))
        count = 0 if self._link is None else -(-size // self._link.slot_bytes)
        if not 0 < count <= len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _exchange(self, x: Tensor, slots: list[int]) -> Wait:
        link = self._link
        assert link is not None
        parts = list(zip(slots, x.view(-1).split(link.slot_bytes // x.element_size()), strict=True))
        for slot, part in parts:
            link.send(slot, part)

        def wait() -> Tensor:
            """The sum: this rank's values plus the peer's, rounded once, so equal on both ranks."""
            while parts:
                slot, part = parts.pop(0)
                part.add_(link.received(slot, part))
                link.release(slot)
                self._free.append(slot)
            return x

        return wait


def rank_sums(group: dist.ProcessGroup, paths: Paths) -> RankSums:
    """The sums over a group, through the peer's memory where the path `tp_symmetric` is on."""
    return RankSums(group, (lambda x: peer_memory.connect(group, x.device)) if paths.on("tp_symmetric") else None)
