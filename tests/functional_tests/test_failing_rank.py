"""A rank that raises ends the others within seconds, and its error comes first; also when the others cannot notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional_tests.script_helpers import environment

# Rank 1 fails. Rank 0 waits for a signal that never comes and, like a rank that saves first, ignores SIGTERM: only the
# watch can end it before the launcher's half a minute.
SCRIPT = """
import signal
from megatron_spec import cli

def main(args):
    from megatron_spec.config import ParallelConfig, UserError
    from megatron_spec.runtime import distributed

    world = distributed.initialize(ParallelConfig())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 1:
        raise {error}("the disk is on fire")
    while True:
        signal.pause()

if __name__ == "__main__":
    cli.run(cli.Parser("test"), main)
"""


@pytest.mark.parametrize(("error", "code"), [("RuntimeError", 1), ("UserError", 2)])
def test_other_ranks_end_and_the_error_comes_first(tmp_path: Path, error: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(error=error))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, timeout=200, env=environment(),
    )  # fmt: skip
    assert done.returncode != 0
    said, ended = done.stderr.index("the disk is on fire"), done.stderr.index("[rank 0] ended, because rank 1 failed")
    assert said < ended, done.stderr
    assert f"exitcode: {code}" in done.stderr.replace(" ", "").replace("exitcode:", "exitcode: "), done.stderr
    assert "SIGKILL" not in done.stderr, "the launcher had to kill a rank that the watch should have ended"
