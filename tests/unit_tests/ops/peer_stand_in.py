"""A stand-in on CPUs for `ops.peer_memory.PeerMemory`: as late and as strict as a link may be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StandInLink:
    """Copies leave at the last moment, and must find what was sent; a released slot holds NaN."""

    def __init__(self, group: Any, slots: int = 6, slot_bytes: int = 1 << 16) -> None:
        self.group, self.slots, self.slot_bytes = group, slots, slot_bytes
        self.sent: dict[range, tuple[Tensor, Tensor]] = {}
        self.inbox: dict[range, Tensor] = {}
        self.exchanges = 0

    def send(self, slots: range, x: Tensor) -> None:
        assert set(slots) <= set(range(self.slots)) - {i for used in (*self.sent, *self.inbox) for i in used}
        assert x.is_contiguous() and x.numel() * x.element_size() <= len(slots) * self.slot_bytes
        self.sent[slots] = (x, x.clone())

    def received(self, slots: range, like: Tensor) -> Tensor:
        x, before = self.sent.pop(slots)
        assert torch.equal(x, before), "overwritten while it was copied"
        peer, self.inbox[slots] = dist.get_global_rank(self.group, 1 - self.group.rank()), torch.empty_like(like)
        works = [dist.isend(before, peer, self.group), dist.irecv(self.inbox[slots], peer, self.group)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        self.exchanges += 1
        return self.inbox[slots]

    def release(self, slots: range) -> None:
        self.inbox.pop(slots).fill_(float("nan"))
