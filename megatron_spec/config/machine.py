"""The device that a process computes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["none", "plain", "triton"]


@dataclass(frozen=True)
class Machine:
    """The device of a rank, found once (`runtime.platform.machine`); fast paths depend on it (`planning.paths`)."""

    gpu: bool = False
    """A CUDA device is available."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the device."""
    kernels: Kernels = "none"
    """What the fast paths are made of: Triton's kernels, their plain twins (on any device, in any dtype: for tests), or
    nothing."""
    grouped_products: bool = True
    """torch has grouped matrix products on this device."""
    tile_products: bool = True
    """Triton is new enough for products by tiles (`ops/kernels/many_rows.py`): 3.6, with which they were tested."""

    @property
    def fp8(self) -> bool:
        """The device multiplies in fp8."""
        return self.capability >= (9, 0)


H100 = Machine(True, (9, 0), "triton")
"""What a run is planned for."""
