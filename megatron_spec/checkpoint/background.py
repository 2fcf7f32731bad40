"""Checkpoints written by a second process while training goes on, through megatron-core's asynchronous save.

Tensors are copied to the host when the save begins; a forked process writes them while training goes on. All ranks
publish together once every one of them has finished, so a kill in between leaves a temporary folder and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_spec.runtime.children import managers_end_with_parent

Guard = Callable[[], AbstractContextManager[Any]]


class BackgroundWriter:
    """At most one save is under way. Every method is a collective."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()
        self._guard: Guard = nullcontext

    def save(self, state: dict[str, Any], folder: Path, publish: Callable[[], None], guard: Guard) -> None:
        """Begin to write a sharded state; `publish` runs on every rank when all have finished.

        Args:
            guard: makes the context in which a part of the writing may fail.
        """
        self._guard = guard
        options = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"  # type: ignore[assignment]  # its default is a package of its own
        with guard(), managers_end_with_parent():
            request: Any = dist_checkpointing.save(state, str(folder), **options)
            request.add_finalize_fn(publish)
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Publish what is complete."""
        with self._guard():
            self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Publish what was begun."""
        with self._guard():
            self._queue.maybe_finalize_async_calls(blocking=True)
