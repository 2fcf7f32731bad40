"""What megatron-core's writers start: threads, not processes, and no process for results of a synchronous save.

A process that is killed (when memory is short, the system kills the largest) never reports, and the save would wait for
it until the job ends. A thread ends with its process, which others notice.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class _Threads:
    """A context of `multiprocessing` whose processes are threads of this one."""

    Process = threading.Thread
    Queue = JoinableQueue = queue.Queue


class _Multiprocessing:
    """`multiprocessing`, where what would be forked is a thread."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_context(self, method: str | None = None) -> Any:
        """A context of `multiprocessing`, or threads."""
        return _Threads if method == "fork" else self._module.get_context(method)


@contextmanager
def threads_write() -> Iterator[None]:
    """Inside, files of a checkpoint are written by threads: of this process, or of one that is forked here."""
    module: Any = filesystem_async
    before, module.mp = module.mp, _Multiprocessing(module.mp)
    try:
        yield
    finally:
        module.mp = before


@contextmanager
def results_in_this_process() -> Iterator[None]:
    """Inside, only synchronous saves: no process is started.

    megatron-core keeps one for results of its asynchronous saves. The first save of a program would wait until that
    process, too, has imported torch: 3 seconds of a processor on every rank.
    """
    module: Any = filesystem_async
    before, module._results_queue = module._results_queue, queue.Queue()
    try:
        with threads_write():
            yield
    finally:
        module._results_queue = before
