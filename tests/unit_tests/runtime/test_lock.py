"""One run at a time in a folder, or a file; locks of killed runs do not count."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.runtime import lock
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


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="no space left"), exclusive(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("age", "then", "stale"), [(2 * STALE, "", True), (0.0, "touched", False), (0.0, "ended", False), (0.0, "", True)]
)
def test_lock_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, then: str, stale: bool
) -> None:
    """A killed job may be started on another machine at once: it waits until it knows that the first does not run."""
    path = tmp_path / NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "today"}))
    os.utime(path, (time.time() - age,) * 2)
    waited = {"seconds": 0.0}

    def wait(seconds: float) -> None:
        """What the other run does in this time."""
        waited["seconds"] += seconds
        if then == "touched":
            os.utime(path, (time.time() + 1,) * 2)
        elif then == "ended":
            path.unlink()

    monkeypatch.setattr("megatron_spec.runtime.lock.time.sleep", wait)
    clock = lock._clock_of
    monkeypatch.setattr(lock, "_clock_of", lambda path: clock(path) + waited["seconds"])
    if stale:
        with exclusive(tmp_path):
            pass
    else:
        with pytest.raises(UserError, match="process 7 on elsewhere"), exclusive(tmp_path):
            pass
    assert path.exists() == (then == "touched")
    assert (STALE <= waited["seconds"] <= STALE + 1) == (age == 0 and then == "")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[1]"])
def test_broken_lock_file_has_no_owner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with exclusive(tmp_path):
        pass
