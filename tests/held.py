"""Another process that holds the lock of an output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from megatron_spec.runtime.lock import exclusive
with exclusive(sys.argv[1], file=bool(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(output: Path, file: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The process; it ends with the block, and then the output is free, if it was not killed."""
    command = [sys.executable, "-c", _HOLD, str(output), "file" if file else ""]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.communicate()
