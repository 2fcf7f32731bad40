"""Child processes that end with their parent, even when it is killed. Standard library only.

A child that outlives a killed parent keeps its output open: `finetune.py | tee log` would never return.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from typing import Any


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


class _Initializer:
    """Starts the watch on the parent, then runs the manager's own initializer."""

    def __init__(self, then: Callable[..., object] | None, args: Any) -> None:
        self.then, self.args = then, args

    def __call__(self) -> None:
        end_with_parent()
        if self.then is not None:
            self.then(*self.args)


@contextmanager
def managers_end_with_parent() -> Iterator[None]:
    """Inside, `multiprocessing` managers end with their parent: megatron-core keeps one for its writers' results."""
    start = BaseManager.start

    def watched(self: Any, initializer: Callable[..., object] | None = None, initargs: Any = ()) -> None:
        """BaseManager.start with `end_with_parent` in the new process."""
        start(self, _Initializer(initializer, initargs))

    BaseManager.start = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseManager.start = start  # type: ignore[method-assign]
