"""Child processes end with their parent, also when it is killed. Standard library only.

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
    """In a process of `multiprocessing`: end it as soon as the process that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        """Wait for the parent's end, then end this process."""
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class _Initializer:
    """Watches the parent, then does what the manager was asked to begin with."""

    def __init__(self, then: Callable[..., object] | None, args: Any) -> None:
        self.then, self.args = then, args

    def __call__(self) -> None:
        end_with_parent()
        if self.then is not None:
            self.then(*self.args)


@contextmanager
def managers_end_with_parent() -> Iterator[None]:
    """Inside, managers of `multiprocessing` are started so: megatron-core keeps one for the results of its writers."""
    start = BaseManager.start

    def watched(self: Any, initializer: Callable[..., object] | None = None, initargs: Any = ()) -> None:
        """BaseManager.start in a process that watches its parent."""
        start(self, _Initializer(initializer, initargs))

    BaseManager.start = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseManager.start = start  # type: ignore[method-assign]
