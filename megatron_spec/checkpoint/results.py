"""Where a synchronous save of megatron-core collects its results: in this process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextmanager
def results_in_this_process() -> Iterator[None]:
    """Inside, only synchronous saves: no manager process is started for their results.

    megatron-core keeps one for its asynchronous saves. The first save of a program would wait until that process, too,
    has imported torch: 3 seconds of a processor on every rank.
    """
    module: Any = filesystem_async
    before, module._results_queue = module._results_queue, queue.Queue()
    try:
        yield
    finally:
        module._results_queue = before
