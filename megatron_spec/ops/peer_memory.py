"""Copies between the memories of two GPUs of one host by their copy engines, without a kernel.

Each rank has slots of symmetric memory (`torch.distributed._symmetric_memory`) that the other rank maps. A rank copies
into a slot of its peer and then counts up the slot's `arrived` flag there; the peer's stream waits for that count,
reads the slot, and counts up the `released` flag on the sender, whose next copy into the slot waits for it. Flags are
written and awaited by the streams themselves (`cuStreamWriteValue32`, `cuStreamWaitValue32`), so nothing takes a
processor from the products, and nothing waits for one. A write of a flag follows the writes before it in its stream,
for all devices (memory fence of `cuStreamWriteValue32`), and waits compare cyclically, so counts may overflow.
"""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.planning.unroll_memory import PEER_MEMORY

log = logging.getLogger(__name__)

SLOTS = 6
SLOT_BYTES = PEER_MEMORY // SLOTS
"""Enough, at 8192 rows of 4096, for three pieces and the gradients of the LM head's input of one draft step."""
_HEADER = 4096
"""Bytes of the flags before the slots: int32 `arrived` and `released` of each slot."""
_WAIT_GEQ, _WAIT_FLUSH, _CAN_FLUSH = 0, 1 << 30, 98  # of cuda.h


class _Driver:
    """Stream memory operations of the CUDA driver.

    Raises OSError or AttributeError where the driver, or these functions, are missing.
    """

    def __init__(self, device: torch.device) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        found = ctypes.c_int(0)
        index = torch.cuda.current_device() if device.index is None else device.index
        _check(library.cuDeviceGetAttribute(ctypes.byref(found), _CAN_FLUSH, index), "cuDeviceGetAttribute")
        self._flags = _WAIT_GEQ | (_WAIT_FLUSH if found.value else 0)

    def write(self, stream: Any, address: int, value: int) -> None:
        """Write to this or the peer's memory, after everything enqueued before."""
        _check(self._write(stream.cuda_stream, address, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32")

    def wait(self, stream: Any, address: int, value: int) -> None:
        """What is enqueued next waits until this rank's memory holds at least the value."""
        _check(self._wait(stream.cuda_stream, address, value & 0xFFFFFFFF, self._flags), "cuStreamWaitValue32")


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


class PeerMemory:
    """An `overlap.PeerLink` of two GPUs. Collective.

    Args:
        driver: stream memory operations.

    Raises RuntimeError where the memory cannot be shared.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        driver: Any,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        self.slots, self.slot_bytes, self._driver = slots, slot_bytes, driver
        size = _HEADER + slots * slot_bytes
        # a block of its own: `symmetric.empty` may reuse memory of a pool, on each rank that of another rendezvous
        self._own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._own[:_HEADER].zero_()
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self._own, group)
        mapped, self._peer = (self._mapped(rank) for rank in (group.rank(), 1 - group.rank()))
        if mapped.data_ptr() != self._own.data_ptr():
            raise RuntimeError("this torch maps symmetric memory at another offset")
        self._stream = torch.cuda.Stream(device)
        self._uses, self._left = [0] * slots, [torch.cuda.Event() for _ in range(slots)]

    def _mapped(self, rank: int) -> Tensor:
        """The memory of a rank, at the offset of this tensor where torch has offsets."""
        view = getattr(self._handle, "get_remote_tensor", self._handle.get_buffer)
        return view(rank, self._own.shape, torch.uint8)  # type: ignore[no-any-return]

    def _values(self, memory: Tensor, slots: range, size: int) -> Tensor:
        start = _HEADER + slots.start * self.slot_bytes
        return memory[start : start + size]

    def _flag(self, memory: Tensor, slot: int, released: bool) -> int:
        return memory.data_ptr() + 4 * (slot + self.slots * released)

    def send(self, slots: range, x: Tensor) -> None:
        """See `overlap.PeerLink`."""
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        for slot in slots:
            self._driver.wait(self._stream, self._flag(self._own, slot, True), self._uses[slot])
            self._uses[slot] += 1
        with torch.cuda.stream(self._stream):
            values = x.view(-1).view(torch.uint8)
            self._values(self._peer, slots, len(values)).copy_(values)
        for slot in slots:
            self._driver.write(self._stream, self._flag(self._peer, slot, False), self._uses[slot])
        self._left[slots.start].record(self._stream)

    def received(self, slots: range, like: Tensor) -> Tensor:
        """See `overlap.PeerLink`."""
        current = torch.cuda.current_stream(like.device)
        current.wait_event(self._left[slots.start])  # `like` may be overwritten, and its memory reused, from now on
        for slot in slots:
            self._driver.wait(current, self._flag(self._own, slot, False), self._uses[slot])
        found = self._values(self._own, slots, like.numel() * like.element_size())
        return found.view(like.dtype).view(like.shape)

    def release(self, slots: range) -> None:
        """See `overlap.PeerLink`."""
        current = torch.cuda.current_stream(self._own.device)
        for slot in slots:
            self._driver.write(current, self._flag(self._peer, slot, True), self._uses[slot])

    def flags(self) -> tuple[list[int], list[int]]:
        """(`arrived`, `released`) of this rank's slots, read by the host."""
        found = self._own[: 8 * self.slots].view(torch.int32).tolist()
        return found[: self.slots], found[self.slots :]


def connect(group: dist.ProcessGroup, device: torch.device, **sizes: int) -> PeerMemory | None:
    """The link of the two ranks of a group, tried out once; None, with the reason in the log, where it does not work.

    Collective. The host looks at flags and values before any stream waits for one, so a link that does not work cannot
    hang.
    """
    link: PeerMemory | None = None

    def share() -> None:
        nonlocal link
        link = PeerMemory(group, device, driver, **sizes)

    def send() -> None:
        assert link is not None
        for slot in range(link.slots):
            link.send(range(slot, slot + 1), _probe(group.rank(), device))
        torch.cuda.synchronize(device)

    def receive() -> None:
        assert link is not None
        if link.flags()[0] != [1] * link.slots:
            raise RuntimeError("a flag did not arrive in the peer's memory")
        for slot in range(link.slots):
            expected, one = _probe(1 - group.rank(), device), range(slot, slot + 1)
            if not torch.equal(link.received(one, expected), expected):
                raise RuntimeError("values did not arrive in the peer's memory")
            link.release(one)
        torch.cuda.synchronize(device)

    def returned() -> None:
        assert link is not None
        if link.flags()[1] != [1] * link.slots:
            raise RuntimeError("a flag did not come back from the peer")

    driver: Any = None
    missing: str | None = None
    try:
        driver = _Driver(device)
    except (OSError, AttributeError, RuntimeError) as error:
        missing = str(error)
    reason = _one_host(group, missing)
    for step in (share, send, receive, returned):
        reason = reason or _failure(group, step)
    if reason is not None:
        log.warning("tp_symmetric is off: %s; sums over tensor parallel ranks are all-reduces", reason)
        return None
    log.info("tp_symmetric: the two tensor parallel ranks copy into each other's memory")
    return link


def _probe(rank: int, device: torch.device) -> Tensor:
    return torch.arange(4096, device=device, dtype=torch.int32) * (rank + 1)


def _one_host(group: dist.ProcessGroup, missing: str | None) -> str | None:
    """Why memory cannot be shared; equal on all ranks."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (socket.gethostname(), missing), group=group)
    if len({host for host, _ in found}) > 1:
        return f"its ranks are on several hosts ({', '.join(host for host, _ in found)})"
    return next((f"the CUDA driver has no stream memory operations ({error})" for _, error in found if error), None)


def _failure(group: dist.ProcessGroup, step: Callable[[], None]) -> str | None:
    """Run a step on every rank; the first failure, equal on all ranks."""
    error = None
    try:
        step()
    except Exception as e:  # whatever torch raises where memory cannot be shared
        error = f"{type(e).__name__}: {e}"
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, error, group=group)
    return next((f"on rank {rank}, {told.splitlines()[0]}" for rank, told in enumerate(found) if told), None)
