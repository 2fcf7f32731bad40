"""Where processes of tests come from: forked from a server that imported torch, megatron-core and this package once.

A new interpreter spends six seconds of processor time on these imports, more than most ranks and scripts of the tests
do afterwards. Forked processes do not show what differs between interpreters: an import that is missing but was made by
others, settings that packages read when they are imported, and the order of sets of strings, which is the same on all
forked ranks. Some tests ask for new interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = [
    "transformers.models.auto",
    *(f"megatron_spec.commands.{name}" for name in ("convert", "decode", "export", "features", "finetune", "quantize")),
    "megatron_spec.api",
    "megatron_spec.training.optimizer",
    "tests.frozen",
]


def context(fresh: bool = False) -> BaseContext:
    """The way to start processes.

    Args:
        fresh: new interpreters, which import everything themselves. With a GPU all are: CUDA does not survive a fork.
    """
    import torch

    if fresh or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def take_over(environment: dict[str, str]) -> None:
    """Give this process its environment: a forked one has that of its server. One thread, no warnings."""
    import warnings

    import torch

    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")  # megatron-core warns once per rank about every optional package
    torch.set_num_threads(1)


def wait_for(processes: Sequence[BaseProcess], timeout: float = float("inf")) -> int | None:
    """Wait until all processes have ended; when one fails, the others are killed.

    Returns:
        0, the exit code of the first that failed, or None: they did not end in time and were killed.
    """
    pending, end, failed = list(processes), time.monotonic() + timeout, 0
    while pending and not failed and time.monotonic() < end:
        for process in list(pending):
            process.join(timeout=0.05)
            if process.exitcode is not None:
                pending.remove(process)
                failed = failed or process.exitcode
    for process in pending:
        process.kill()
        process.join()
    return failed if failed or not pending else None


def _script(path: str, arguments: list[str], out: str, folder: str, environment: dict[str, str]) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"{out}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    take_over(environment)
    sys.argv = [path, *arguments]
    sys.path[:0] = [str(Path(path).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(path, run_name="__main__")


def _launched(port: int, size: int) -> list[dict[str, str]]:
    """What torchrun would set for ranks of one machine, whose store is here."""
    common = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(size)]


def run_script(
    path: str, arguments: list[str], processes: int, environment: dict[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for `python path arguments` or torchrun, from processes that have imported all.

    Args:
        processes: ranks of one world; 0 without a launcher.
        folder: working directory of the script.

    Raises:
        subprocess.TimeoutExpired: it did not end in time and was killed.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if processes else None
    own = _launched(store.port, processes) if store else [{}]
    with tempfile.TemporaryDirectory() as out:
        common = (path, arguments, out, str(folder))
        started = [context().Process(target=_script, args=(*common, {**environment, **one})) for one in own]
        for process in started:
            process.start()
        code = wait_for(started, timeout)
        said = [Path(out, name).read_text(encoding="utf-8") for name in ("1", "2")]
    if code is None:
        raise subprocess.TimeoutExpired([path, *arguments], timeout, *said)
    return subprocess.CompletedProcess([path, *arguments], code, *said)
