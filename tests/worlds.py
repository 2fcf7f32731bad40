"""Run a function on several gloo ranks of this machine, and get each rank's result back.

Start-up costs seconds, so one world should run many cases: `fn` may loop over them and return a dictionary.
`fn` must be a module-level function; results travel as pickles through a temporary folder.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm


def _entry(
    rank: int, size: int, port: int, folder: str, environment: dict[str, str], fn: Callable[..., Any], args: Any
) -> None:
    import torch

    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    warm.take_over({**environment, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        result = fn(*args)
        Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # rank 0 hosts the store: it must not leave first
        code = 0
    except BaseException:
        Path(folder, f"{rank}.err").write_text(traceback.format_exc())
        code = 1  # the others may wait in a collective: the parent ends them
    for child in multiprocessing.active_children():  # writers of dist_checkpointing outlive an os._exit
        child.kill()
    os._exit(code)  # skip interpreter teardown of process groups


def free_port() -> int:
    """A port below those that the system hands out for connections, so that no other world takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def run_world(size: int, fn: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Any]:
    """Results of `fn(*args)` on ranks 0..size-1. A failing rank ends the world and shows its traceback.

    Args:
        fresh: every rank is a new interpreter, with an order of sets of its own (`tests/warm.py`).
    """
    with tempfile.TemporaryDirectory() as folder:
        common = (size, free_port(), folder, dict(os.environ), fn, args)
        ranks: list[Any] = [warm.context(fresh).Process(target=_entry, args=(r, *common)) for r in range(size)]
        for p in ranks:
            p.start()
        warm.wait_for(ranks)
        errors = [e.read_text() for e in sorted(Path(folder).glob("*.err"))]
        if errors:
            raise RuntimeError("a rank failed:\n" + "\n".join(errors))
        return [pickle.loads(Path(folder, f"{r}.pkl").read_bytes()) for r in range(size)]


def gather_tp(x: Any, world: Any, dim: int = -1) -> Any:
    """The shards of all tensor parallel ranks, concatenated."""
    import torch

    shards = [torch.empty_like(x) for _ in range(world.tp_size)]
    torch.distributed.all_gather(shards, x.contiguous(), group=world.tp)
    return torch.cat(shards, dim=dim)
