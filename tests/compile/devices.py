"""A stand-in for Triton's driver: kernels compile for a GPU that this machine does not have; launches do nothing.

What it cannot show is what a kernel computes; Triton's interpreter does (tests/gpu with TRITON_INTERPRET=1).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory of a block by compute capability (CUDA C++ Programming Guide, technical specifications)."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass
class Compiled:
    """A kernel as compiled."""

    name: str
    hash: str
    spilled: int
    """Bytes of registers that a thread keeps in memory."""
    ptx: str


@dataclass
class Device:
    """What Triton asks a driver, for one compute capability."""

    capability: int
    compiled: list[Compiled] = field(default_factory=list)

    @property
    def utils(self) -> Device:
        """The part of a driver that loads binaries."""
        return self

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        """A launcher that does nothing."""
        return lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number that no GPU of this machine has; Triton keeps what it compiled by it."""
        return 1000 + self.capability

    def get_current_stream(self, device: int) -> int:
        """Of nothing."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What Triton compares a kernel's needs with."""
        return {"max_shared_mem": SHARED_BYTES[self.capability]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled bytes, threads at most) of a binary."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert found, told
        return 1, 1, int(found[1]), int(found[2]), 1024


@contextmanager
def compiling_for(capability: int) -> Iterator[Device]:
    """Inside, kernels that are called with tensors of the CPU compile for a GPU of this compute capability."""
    device, run, before = Device(capability), JITFunction.run, driver._active
    seen: set[int] = set()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        """JITFunction.run, which tells what it compiled."""
        kernel = run(self, *args, **kwargs)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            device.compiled.append(Compiled(kernel.name, kernel.hash, kernel.n_spills, kernel.asm["ptx"]))
        return kernel

    driver.set_active(device)
    JITFunction.run = watched
    try:
        yield device
    finally:
        JITFunction.run = run
        driver._active = before


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor whose memory nobody touches, so that real models' sizes cost nothing."""
    return torch.empty(*shape, dtype=dtype)
