"""One run at a time in a folder, or a file; locks of killed runs do not count."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.runtime.lock import NAME, STALE, exclusive
from tests.held import held


def test_a_folder_in_use_names_host_and_process(tmp_path: Path) -> None:
    with held(tmp_path / "run") as other:
        in_use = f"in use by process {other.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=in_use), exclusive(tmp_path / "run"):
            pass
        other.kill()
    assert (tmp_path / "run" / NAME).is_file(), "a killed run leaves it"
    with exclusive(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []
    with exclusive(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists(), "nothing was written"


def test_a_file_in_use(tmp_path: Path) -> None:
    """The lock is beside it; another file of the folder is free."""
    output = tmp_path / "out" / "train.jsonl"
    lock = output.with_name(f"train.jsonl{NAME}")
    with held(output, file=True) as other:
        in_use = f"jsonl is in use by process {other.pid}.* another file; .* remove {lock}"
        with pytest.raises(UserError, match=in_use), exclusive(output, file=True):
            pass
        with exclusive(output.with_name("other.jsonl"), file=True):
            pass
        other.kill()
    assert lock.is_file(), "a killed run leaves it"
    with exclusive(output, file=True):
        output.write_text("x")
    assert [p.name for p in output.parent.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(("age", "stale"), [(0.0, False), (2 * STALE, True)])
def test_lock_of_another_machine(tmp_path: Path, age: float, stale: bool) -> None:
    path = tmp_path / NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "today"}))
    os.utime(path, (time.time() - age,) * 2)
    if stale:
        with exclusive(tmp_path):
            pass
    else:
        with pytest.raises(UserError, match="process 7 on elsewhere"), exclusive(tmp_path):
            pass
    assert path.exists() != stale


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[1]"])
def test_broken_lock_file_has_no_owner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with exclusive(tmp_path):
        pass
