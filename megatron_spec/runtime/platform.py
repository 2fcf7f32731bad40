"""CUDA or CPU: makes megatron-core run without a GPU.

megatron-core writes `device="cuda"`, calls `torch.cuda.current_device()` and compares `tensor.type()` with
'torch.cuda.FloatTensor'. On a machine without a GPU, `activate()` enters, once at start-up, a torch function mode that
redirects all of these to the CPU. With a GPU it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from megatron_spec.config.machine import Machine

_CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def to_device(x: torch.Tensor, place: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to a device; to a GPU from pinned memory, so without a device synchronisation."""
    if torch.device(place).type == "cuda" and x.device.type == "cpu":
        return (x if x.is_pinned() else x.pin_memory()).to(place, non_blocking=True)
    return x.to(place)


def to_host(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the host. The result waits for the copy, but not for later work, and returns it."""
    if x.device.type != "cuda":
        copied = x.clone()
        return lambda: copied
    kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    kept.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        """The copy."""
        done.synchronize()
        return kept

    return wait


class CopyStream:
    """Copies to a device that overlap with its computation: on a stream of their own (a GPU's)."""

    def __init__(self, place: torch.device) -> None:
        self.stream = torch.cuda.Stream(place) if place.type == "cuda" else None

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Operations of this block go to the stream, also in another thread."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def arrival(self, *copied: torch.Tensor) -> Callable[[], None]:
        """Called after the copies were started. The result makes the current stream wait for them, not the host.

        Nothing else may use these tensors before.
        """
        if self.stream is None:
            return lambda: None
        done = torch.cuda.Event()
        done.record(self.stream)

        def wait() -> None:
            """Before the first use on the current stream."""
            current = torch.cuda.current_stream(self.stream.device)  # type: ignore[union-attr]
            current.wait_event(done)
            for x in copied:  # their memory belongs to the other stream
                x.record_stream(current)

        return wait


class Aside:
    """Short work whose result the host reads, on a stream of its own (a GPU's) beside the computation."""

    def __init__(self, place: torch.device) -> None:
        self.stream = torch.cuda.Stream(place, priority=-1) if place.type == "cuda" else None

    def now(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What the current stream has now is what the work needs: the result is entered later, and operations inside
        do not wait for what was queued since."""
        if (stream := self.stream) is None:
            return contextlib.nullcontext
        ready = torch.cuda.Event()
        ready.record()

        def aside() -> contextlib.AbstractContextManager[Any]:
            """The stream, once that work is done."""
            stream.wait_event(ready)
            return torch.cuda.stream(stream)

        return aside


def device_memory() -> float:
    """Bytes of the GPU's memory; unlimited without one."""
    return float(torch.cuda.mem_get_info()[1]) if has_cuda() else float("inf")


def has_cuda() -> bool:
    """True if there is a GPU to compute on."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


@functools.cache
def machine() -> Machine:
    """The properties of this rank's machine that fast paths depend on."""
    grouped = hasattr(torch.nn.functional, "grouped_mm")
    if not has_cuda():
        return Machine(grouped_products=grouped)
    triton = importlib.util.find_spec("triton") is not None
    tiles = triton and Version(getattr(importlib.import_module("triton"), "__version__", "0")) >= Version("3.6")
    return Machine(True, torch.cuda.get_device_capability(), "triton" if triton else "none", grouped, tiles)


def backend() -> str:
    """torch.distributed backend of the device."""
    return "nccl" if has_cuda() else "gloo"


def _is_cuda(dev: Any) -> bool:
    if isinstance(dev, torch.device):
        return dev.type == "cuda"
    return isinstance(dev, str) and dev.startswith("cuda")


_METHODS = frozenset({torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type})
"""Methods that name a device, or a type of one, without a keyword."""


class _CpuMode(TorchFunctionMode):
    """Rewrites requests for CUDA into requests for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _METHODS:  # most calls; each one comes here
            return func(*args)
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer and gradient clipping accept only CUDA type names.
            return _CUDA_TYPES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)


class _NoNvtx:
    """Replaces torch.cuda.nvtx."""

    def range_push(self, *_: Any) -> None:
        """Nothing."""

    range_pop = mark = range_push


_active: _CpuMode | None = None


def activate() -> None:
    """Make megatron-core usable on this machine. Idempotent; call before building any megatron-core object."""
    global _active
    if _active is not None or has_cuda():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda: None
    cuda.nvtx = _NoNvtx()
    cuda.current_stream = lambda *_, **__: contextlib.nullcontext()
    _active = _CpuMode()
    _active.__enter__()


def direct() -> contextlib.AbstractContextManager[Any]:
    """Context without the torch function mode, for code that never names CUDA, where rewriting calls costs 8 %."""
    return torch._C.DisableTorchFunction() if _active is not None else contextlib.nullcontext()
