"""Time of every phase of every decoding step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Costs:
    """Seconds of each run of each phase. Synchronises with the device around each phase, which costs some time."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    apart: ClassVar[bool] = True
    """Draft, base and observation are timed one by one, so they are not one graph (phase "cycle")."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a run of phase `name`: prefill, draft, base, read (the wait for the results), observe."""
        start = now()
        yield
        self.seconds.setdefault(name, []).append(now() - start)

    def typical(self, name: str) -> float:
        """Median seconds per run of a phase (the first runs of a shape are slow); 0 if it never ran."""
        return statistics.median(self.seconds.get(name, [0.0]))


class NoCosts(Costs):
    """Measures nothing and does not synchronise."""

    apart = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the block."""
        yield


def now() -> float:
    """`time.perf_counter` after a device synchronisation."""
    import torch  # here: --help of the benchmarks does without

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
