"""Child processes end with a killed parent, so readers of its output see the end of file; signals do not end them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

MANAGER = """
with managers_end_with_parent():
    manager = multiprocessing.get_context("spawn").Manager()
manager.Queue().put(1)
"""
STOPPED = """
with managers_end_with_parent():
    manager = multiprocessing.get_context("spawn").Manager()
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(True))
for number in (signal.SIGTERM, signal.SIGUSR1):
    os.killpg(0, number)
queue = manager.Queue()
queue.put(1)
assert queue.get() == 1 and len(stopped) == 2, stopped
"""
POOL = """
found = ordered_map(Work, (), itertools.count(), 2)
next(found)
"""
WRITER = """
distributed.initialize()
background.dist_checkpointing.save = lambda *_, **__: AsyncRequest(signal.pause, (), [])
background.BackgroundWriter().save({}, Path("a/b/c"), print, contextlib.nullcontext)
"""
PROGRAM = """
import contextlib, itertools, multiprocessing, os, signal
from pathlib import Path
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron_spec.checkpoint import background
from megatron_spec.data.workers import ordered_map
from megatron_spec.runtime import distributed
from megatron_spec.runtime.children import managers_end_with_parent
from tests.unit_tests.runtime.test_children import Work
if __name__ == "__main__":
    {body}
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Work:
    """Doubles a number."""

    def __call__(self, x: int) -> int:
        """2 x."""
        return 2 * x


@pytest.mark.parametrize(
    "body", [MANAGER, STOPPED, POOL, WRITER], ids=["manager", "manager after a signal", "pool", "writer"]
)
def test_output_ends_with_a_killed_parent(body: str) -> None:
    program = PROGRAM.replace("{body}", body.strip().replace("\n", "\n    "))
    # capture_output waits until the last process that holds the pipes is gone
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, start_new_session=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
