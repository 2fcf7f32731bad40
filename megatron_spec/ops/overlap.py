"""Sums over tensor parallel ranks that run while other rows are computed.

A sharded layer ends with a sum over ranks that the next operation needs. With its rows in two pieces, the sum of one
piece runs on the network while the other piece is multiplied. NCCL's kernels take processors from the products
meanwhile; two GPUs of one host can exchange their parts by copy engines instead (`peer_memory.py`).

R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

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


class Sum:
    """x, summed over ranks when it is called, in place; may be called again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self) -> Tensor:
        """The sum."""
        return self.x

    @contextmanager
    def addends(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(sum, None), or (x, what remains to be added to it and rounded once more). Inside, the operations that read
        them are enqueued; used once, and instead of the call."""
        yield self(), None


class _Reduced(Sum):
    """By an all-reduce that was started."""

    def __init__(self, x: Tensor, work: Any) -> None:
        super().__init__(x)
        self._work = work

    def __call__(self) -> Tensor:
        self._work.wait()
        return self.x


class Biased(Sum):
    """Another sum plus a bias [H]."""

    def __init__(self, inner: Sum, bias: Tensor) -> None:
        super().__init__(inner.x)
        self._inner: Sum | None = inner
        self._bias = bias

    def __call__(self) -> Tensor:
        """The sum plus the bias."""
        if self._inner is not None:
            self.x, self._inner = self._inner().add_(self._bias), None
        return self.x


class PeerLink(Protocol):
    """Adjacent slots in the memory of each of two ranks, into which the other one copies."""

    slots: int
    slot_bytes: int

    def send(self, slots: range, x: Tensor) -> None:
        """Start to copy x (contiguous) into the peer's slots, once the peer has released them."""

    def received(self, slots: range, like: Tensor) -> Tensor:
        """What the peer copied into this rank's slots, in the shape and dtype of `like`. What was sent from this rank
        has left, too."""

    def release(self, slots: range) -> None:
        """The last read of this rank's slots was enqueued: the peer may copy into them again."""


class _Exchanged(Sum):
    """Each rank's values plus the peer's, rounded once, so equal on both."""

    def __init__(self, x: Tensor, link: PeerLink, slots: range, free: set[int]) -> None:
        super().__init__(x)
        self._link, self._slots, self._free = link, slots, free
        self._left: Literal["to add", "nothing", "added elsewhere"] = "to add"
        link.send(slots, x)

    def __call__(self) -> Tensor:
        assert self._left != "added elsewhere"
        if self._left == "to add":
            with self.addends() as (own, peer):
                own.add_(peer)  # type: ignore[arg-type]
            self._left = "nothing"
        return self.x

    @contextmanager
    def addends(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        assert self._left == "to add"
        yield self.x, self._link.received(self._slots, self.x)
        self._link.release(self._slots)
        self._free.update(self._slots)
        self._left = "added elsewhere"


class RankSums:
    """Sums over the ranks that share a layer.

    Args:
        connect: opens the link of two ranks at the first sum that is large enough for it (collective); it may return
            None. Without it, all sums are all-reduces of the group.
    """

    def __init__(self, group: dist.ProcessGroup, connect: Callable[[Tensor], PeerLink | None] | None = None) -> None:
        self.group, self._connect = group, connect
        self._link: PeerLink | None = None
        self._free: set[int] = set()

    def pieces(self, rows: int) -> list[slice]:
        """The rows in one piece, or in two where several ranks sum enough rows."""
        if self.group.size() == 1 or rows < 2 * SMALLEST_PIECE:
            return [slice(0, rows)]
        multiple = min(_MULTIPLE, SMALLEST_PIECE)
        middle = rows // 2 // multiple * multiple
        return [slice(0, middle), slice(middle, rows)]

    def start(self, x: Tensor) -> Sum:
        """Start to sum x over the group, in place; x must not be used before the result was called.

        Ranks call it in the same order, with equal shapes.
        """
        if self.group.size() == 1:
            return Sum(x)
        slots = self._slots_for(x)
        if slots is None or self._link is None:
            return _Reduced(x, dist.all_reduce(x, group=self.group, async_op=True))
        return _Exchanged(x, self._link, slots, self._free)

    def _slots_for(self, x: Tensor) -> range | None:
        """Adjacent free slots for all of x, equal on both ranks; None: too small, too large, or no link."""
        size = x.numel() * x.element_size()
        if (self._connect is None and self._link is None) or size < SMALLEST_COPY or not x.is_contiguous():
            return None
        if self._connect is not None:
            self._link, self._connect = self._connect(x), None
            self._free = set() if self._link is None else set(range(self._link.slots))
        if self._link is None:
            return None
        count = -(-size // self._link.slot_bytes)
        for first in sorted(self._free):
            if self._free.issuperset(taken := range(first, first + count)):
                self._free.difference_update(taken)
                return taken
        return None


def rank_sums(group: dist.ProcessGroup, paths: Paths) -> RankSums:
    """The sums over a group, through the peer's memory where the path `tp_symmetric` is on."""
    return RankSums(group, (lambda x: peer_memory.connect(group, x.device)) if paths.on("tp_symmetric") else None)
