"""Child processes that end with their parent, even when it is killed. Standard library only.

A child that outlives a killed parent keeps its output open: `finetune.py | tee log` would never return.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from typing import Any

STOP = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and end. Schedulers and `timeout` send them to all of its processes."""


def end_with_parent() -> None:
    """End this `multiprocessing` process as soon as its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        """Wait until the parent ends, then end this process."""
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def ends_with_parent(work: Callable[..., object]) -> Callable[..., object]:
    """`work` for a forked process, which ends with its parent."""

    def watched(*args: Any, **options: Any) -> object:
        """`end_with_parent`, then `work`."""
        end_with_parent()
        return work(*args, **options)

    return watched


class _Initializer:
    """Starts the watch on the parent, then runs the manager's own initializer."""

    def __init__(self, then: Callable[..., object] | None, args: Any) -> None:
        self.then, self.args = then, args

    def __call__(self) -> None:
        end_with_parent()
        if self.then is not None:
            self.then(*self.args)


@contextmanager
def _blocked_in_children() -> Iterator[None]:
    """Inside, `STOP` is blocked, and stays so in processes started here; this one gets its signals afterwards."""
    resource_tracker.ensure_running()  # when it starts, it unblocks SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def managers_end_with_parent() -> Iterator[None]:
    """Inside, `multiprocessing` managers end with their parent, and only then: megatron-core keeps one for its writers'
    results, without which a run that a signal stops could not save."""
    start = BaseManager.start

    def watched(self: Any, initializer: Callable[..., object] | None = None, initargs: Any = ()) -> None:
        """BaseManager.start with `end_with_parent` in the new process."""
        with _blocked_in_children():
            start(self, _Initializer(initializer, initargs))

    BaseManager.start = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseManager.start = start  # type: ignore[method-assign]
