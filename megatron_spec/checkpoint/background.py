"""Checkpoints written by a process beside the training, through megatron-core's asynchronous save.

Tensors are copied to the host when the save begins; a forked process writes them while training goes on. All ranks
publish together once every one of them has finished, so a kill in between leaves a temporary folder and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue


class BackgroundWriter:
    """At most one save is under way. Every method is a collective."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()

    def save(self, state: dict[str, Any], folder: Path, publish: Callable[[], None]) -> None:
        """Begin to write a sharded state; `publish` runs on every rank when all have finished."""
        options = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"  # type: ignore[assignment]  # its default is a package of its own
        request: Any = dist_checkpointing.save(state, str(folder), **options)
        request.add_finalize_fn(publish)
        self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Publish what is complete."""
        self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Publish what was begun."""
        self._queue.maybe_finalize_async_calls(blocking=True)
