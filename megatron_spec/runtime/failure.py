"""A failing rank ends all other ranks within seconds, even inside a collective.

A collective with a missing rank can wait for minutes (NCCL), and a launcher cannot distinguish a rank that saves before
it exits from one that hangs. So a failing rank first reports its error, then records it in torch.distributed's
rendezvous store; a thread of every rank polls the store once a second and ends its process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

SECONDS = 1.0
"""Seconds between two reads of the store."""
READ = timedelta(seconds=10)
"""Longest time of one read."""


def under_launcher() -> bool:
    """True when torchrun started this process as one of several; torchrun's agent hosts the store."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _store() -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=READ)
    attempt = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"megatron_spec/{attempt}", store)


class FailureWatch(threading.Thread):
    """Ends this process when another rank has failed."""

    def __init__(self) -> None:
        super().__init__(name="failure watch", daemon=True)
        self.store, self.leaving = _store(), threading.Event()

    def run(self) -> None:
        """Poll until this process exits or the store is gone."""
        while not self.leaving.wait(SECONDS):
            try:
                failed = self.store.get("failed").decode() if self.store.check(["failed"]) else None
            except (RuntimeError, ConnectionError):
                return
            if failed and not self.leaving.is_set():
                sys.stderr.write(f"[rank {os.environ['RANK']}] ended, because {failed}\n")
                sys.stderr.flush()
                os._exit(1)


def watch() -> None:
    """Start to watch for failures of other ranks, if torchrun started several."""
    if under_launcher() and not any(isinstance(t, FailureWatch) for t in threading.enumerate()):
        FailureWatch().start()


def leave(error: str | None) -> bool:
    """Called by a rank that exits: stop watching and, after an error, report it to all other ranks.

    Returns:
        True when nothing reads the store any more. A thread that Python's exit finds inside the store's C++ code would
        abort the process, so a rank without an error waits for its last read.
    """
    watching = [t for t in threading.enumerate() if isinstance(t, FailureWatch)]
    for thread in watching:
        thread.leaving.set()
    if error is None:
        for thread in watching:
            thread.join(2 * READ.total_seconds())  # two reads: whether there is an error, and the error
    elif watching:
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            if not watching[0].store.check(["failed"]):
                watching[0].store.set("failed", f"rank {os.environ['RANK']} failed: {error}")
    return not any(thread.is_alive() for thread in watching)
