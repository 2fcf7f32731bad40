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
        self.sent: dict[int, tuple[Tensor, Tensor]] = {}
        self.inbox: dict[int, Tensor] = {}
        self.exchanges = 0

    def send(self, slot: int, x: Tensor) -> None:
        assert 0 <= slot < self.slots and slot not in self.sent and slot not in self.inbox
        assert x.is_contiguous() and x.numel() * x.element_size() <= self.slot_bytes
        self.sent[slot] = (x, x.clone())

    def received(self, slot: int, like: Tensor) -> Tensor:
        x, before = self.sent.pop(slot)
        assert torch.equal(x, before), "overwritten while it was copied"
        peer, self.inbox[slot] = dist.get_global_rank(self.group, 1 - self.group.rank()), torch.empty_like(like)
        works = [dist.isend(before, peer, self.group), dist.irecv(self.inbox[slot], peer, self.group)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        self.exchanges += 1
        return self.inbox[slot]

    def release(self, slot: int) -> None:
        self.inbox.pop(slot).fill_(float("nan"))
