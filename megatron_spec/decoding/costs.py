"""Where the time of decoding goes: seconds of every phase of every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Costs:
    """Seconds of every run of each phase; waiting for the device around each phase costs some time."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a run of phase `name`: prefill, draft, base, observe."""
        start = now()
        yield
        self.seconds.setdefault(name, []).append(now() - start)

    def typical(self, name: str) -> float:
        """Median seconds of a run of a phase (first runs of a shape are slow); 0 for one that never ran."""
        return statistics.median(self.seconds.get(name, [0.0]))


class NoCosts(Costs):
    """Measures nothing: no device synchronisation."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the block."""
        yield


def now() -> float:
    """Wall clock, when everything asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
