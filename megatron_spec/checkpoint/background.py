"""Checkpoints written by a second process while training continues, with megatron-core's asynchronous save.

Tensors are copied to the host when the save begins; a forked process then writes them. All ranks publish together once
every one of them has finished, so a run killed in between leaves only a temporary folder. Its writers end with it: they
hold a copy of draft and optimizer, and would write into the folder of a run that resumes at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron_spec.checkpoint.results import threads_write
from megatron_spec.config import UserError
from megatron_spec.runtime.children import ends_with_parent, managers_end_with_parent

_NO_RESULT = "results_queue should not be empty"
"""megatron-core's error when a writer has ended without a result."""

Guard = Callable[[], AbstractContextManager[Any]]


class BackgroundWriter:
    """Runs at most one save at a time. Every method is a collective."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()
        self._guard: Guard = nullcontext
        self._checkpoint = Path()

    def save(self, state: dict[str, Any], folder: Path, publish: Callable[[], None], guard: Guard) -> None:
        """Start writing a sharded state; `publish` runs on every rank when all have finished.

        Args:
            guard: creates the context manager around each part of the save that may fail.
        """
        self._guard, self._checkpoint = guard, folder.parents[1]
        options = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"  # type: ignore[assignment]  # the default needs another package
        with guard(), managers_end_with_parent(), threads_write():
            request: Any = dist_checkpointing.save(state, str(folder), **options)
            request.add_finalize_fn(publish)
            if request.async_fn is not None:  # else this rank writes nothing
                request = request._replace(async_fn=ends_with_parent(request.async_fn))
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Publish the save if it has finished."""
        self._finalize(blocking=False)

    def wait(self) -> None:
        """Wait for the save to finish and publish it."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        with self._guard():
            try:
                self._queue.maybe_finalize_async_calls(blocking=blocking)
            except (Exception, CheckpointException) as e:
                if _NO_RESULT not in str(e):
                    raise
                raise UserError(
                    f"a checkpoint in {self._checkpoint} was not written: the process that wrote it was killed. "
                    "--async-save holds another copy of draft and optimizer in host memory: leave it out if memory was "
                    "short, and start again to continue"
                ) from e
