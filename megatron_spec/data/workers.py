"""Process a stream in several processes, in order, with a bounded number of pieces in memory."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from megatron_spec.runtime.children import end_with_parent

T = TypeVar("T")
R = TypeVar("R")


CGROUPS = Path("/sys/fs/cgroup")
THREADS = 8
"""Most threads that tokenise texts beside the Python code that makes them."""


def usable_cpus() -> int:
    """Processors this process may use: those it may run on, or fewer by the time that its container gets."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(count, _quota())))


def _quota() -> float:
    """Processors' worth of time that the container gets; infinite without a limit."""
    try:
        if (CGROUPS / "cpu.max").is_file():
            most, period = (CGROUPS / "cpu.max").read_text().split()
        else:  # cgroups of version 1
            most, period = (
                (CGROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return math.inf if most == "max" or int(most) <= 0 else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def tokeniser_threads() -> int:
    """Threads of one process that tokenise texts."""
    return min(THREADS, usable_cpus())


def ordered_map(
    make_work: Callable[..., Callable[[T], R]], args: tuple[Any, ...], pieces: Iterable[T], workers: int
) -> Iterator[R]:
    """`map(make_work(*args), pieces)` in `workers` fresh processes (in this one for fewer than two).

    `make_work`, a module-level function or class, is called once in each process. At most four pieces per worker are
    read ahead, so memory does not depend on the length of the stream. An exception in a piece is raised at its position
    and ends the iteration.
    """
    if workers < 2:
        yield from map(make_work(*args), pieces)
        return
    # Fresh processes, because forking one with threads of torch or CUDA may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (make_work, args)) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_do, piece))
                if len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # Let the pool drop pending futures: cancelling them one by one can hang its manager (CPython 3.11).
            pool.shutdown(cancel_futures=True)


_work: list[Callable[[Any], Any]] = []
"""The work of a pool process; a pool passes only pieces."""


def _start(make_work: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    end_with_parent()
    _work[:] = [make_work(*args)]


def _do(piece: Any) -> Any:
    return _work[0](piece)
