"""Process a stream in several processes, in order, with a bounded number of pieces in memory."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from megatron_spec.runtime.children import end_with_parent

T = TypeVar("T")
R = TypeVar("R")


def usable_cpus() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
