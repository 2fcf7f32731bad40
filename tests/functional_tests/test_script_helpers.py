"""A forked script does what a new interpreter does: arguments, folder, environment, output, exit code, death."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.functional_tests.script_helpers import run_script, succeed

SCRIPT = """
import os, signal, sys

class Mine:
    pass

print(__name__, sys.argv[1:], sys.path[0], os.getcwd(), os.environ["OMP_NUM_THREADS"], "RANK" in os.environ)
print(Mine.__module__, sys.modules["__main__"].Mine is Mine, file=sys.stderr)
match sys.argv[1]:
    case "text": sys.exit("a message")
    case "signal": sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)
    case "error": raise RuntimeError("a bug")
    case "forever": signal.pause()
    case code: sys.exit(int(code))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


@pytest.mark.parametrize(("ending", "code"), [("0", 0), ("3", 3), ("text", 1), ("error", 1), ("signal", -9)])
def test_a_forked_script_is_like_a_new_interpreter(script: str, ending: str, code: int) -> None:
    forked, new = (run_script(script, ending, fresh=fresh) for fresh in (False, True))
    assert forked.returncode == new.returncode == code
    assert forked.stdout == new.stdout and forked.stdout.startswith(f"__main__ ['{ending}']")
    assert forked.stderr.splitlines()[0] == new.stderr.splitlines()[0] == "__main__ True"
    assert forked.stderr.splitlines()[-1] == new.stderr.splitlines()[-1]


def test_a_forked_script_that_does_not_end_is_killed(script: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(script, "forever", timeout=1)


RANKS = """
import os, signal, sys

import torch

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
found = [None, None]
torch.distributed.all_gather_object(found, rank)
if sys.argv[1] == "fail":
    signal.pause() if rank == 0 else sys.exit(5)
print(found)
torch.distributed.destroy_process_group()
"""


def test_forked_ranks_communicate_and_end_with_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    path = str(tmp_path / "script.py")
    assert succeed(path, "work", processes=2).count("[0, 1]") == 2
    assert run_script(path, "fail", processes=2).returncode == 5
