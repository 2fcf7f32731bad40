"""Folders appear complete or not at all, and temporary files of killed runs are removed."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_spec.config import UserError
from megatron_spec.runtime.files import (
    append_text,
    check_object,
    drop_half_line,
    read_json,
    read_object,
    replacing,
    require_space,
    write_json,
    write_text,
    writing,
)
from megatron_spec.runtime.folders import published_folder, require_empty
from megatron_spec.runtime.temporary import FORGOTTEN, temporary_name


def test_temporaries_of_killed_runs_are_removed(tmp_path: Path) -> None:
    """Those of this machine's processes at once, those of another machine after a day without a write."""
    mine = temporary_name(tmp_path / "out").name.removesuffix(str(os.getpid()))
    here = os.getppid()  # of a process that runs
    kept = [f"{mine}{here}", f"{mine}mine", ".out.tmp-00000000-99999998", ".outer.tmp-1", ".other.tmp-1", ".out.tmp-x"]
    old = ".out.tmp-00000000-1"
    for name in (f"{mine}99999998", old, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    yesterday = time.time() - FORGOTTEN - 60
    for path in (tmp_path / old / "file", tmp_path / old, tmp_path / kept[2]):  # of the last, a file was just written
        os.utime(path, (yesterday, yesterday))
    with published_folder(tmp_path / "out") as temporary:
        (temporary / "file").write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "out"])
    assert (tmp_path / "out" / "file").read_text() == "whole"


def test_machines_that_share_a_folder_do_not_share_temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers number their processes alike; a process of another machine is not running here."""
    path = tmp_path / "manifest.json"
    with replacing(path) as first:
        first.write_text("first")
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
            with replacing(path) as second:
                second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("folder", [False, True])
def test_contents_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool) -> None:
    synced: list[int] = []
    order: list[str] = []
    replace = os.replace

    def rename(source: Path, target: Path) -> None:
        files = [p for p in (source, *source.rglob("*")) if p.is_file()]
        assert files and {p.stat().st_ino for p in files} <= set(synced)
        order.append("renamed")
        replace(source, target)

    monkeypatch.setattr("os.fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    monkeypatch.setattr("os.replace", rename)
    if folder:
        with published_folder(tmp_path / "out") as temporary:
            (temporary / "inside").mkdir()
            (temporary / "inside" / "file").write_text("x")
    else:
        write_text(tmp_path / "out", "x")
    assert order == ["renamed"] and synced[-1] == tmp_path.stat().st_ino

    def refused(handle: int) -> None:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr("os.fsync", refused)  # a network file system says only now that there is no room
    with pytest.raises(UserError, match="no space left"):
        write_text(tmp_path / "next", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_block_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"), published_folder(tmp_path / "out") as temporary:
        (temporary / "file").write_text("half")
        raise RuntimeError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="not empty"), published_folder(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == "mine"


# ---- a full disk, and places that cannot be written


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_path_and_size_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "file", "before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=rf"{tmp_path}/file cannot be written: no space left .*about 1.5 KiB are"):
            write_text(tmp_path / "file", "x" * 1536)
    with pytest.raises(UserError, match=r"/out cannot be written.*no space"), published_folder(tmp_path / "out") as new:
        (new / "half").write_text("x")
        full()
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_full_disks_of_other_writers_are_recognised(tmp_path: Path) -> None:
    """safetensors and torch report them with their own messages, megatron-core's writers from another process."""
    with pytest.raises(UserError, match="no space left"), replacing(tmp_path / "x") as temporary:
        temporary.symlink_to("/dev/full")
        with temporary.open("w") as file:
            file.write("x" * 10_000)
    with pytest.raises(UserError, match="no space left"), writing(tmp_path / "x"):
        torch.save(torch.zeros(10_000), "/dev/full")
    with pytest.raises(UserError, match="no space left"), writing(tmp_path / "x"):
        raise CheckpointException("save", {1: (OSError(errno.ENOSPC, "x"), traceback.StackSummary())})
    with (
        pytest.raises(UserError, match=r"missing/x cannot be written.*No such file"),
        writing(tmp_path / "missing" / "x"),
    ):
        save_file({"a": torch.zeros(1)}, tmp_path / "missing" / "x")
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "x"):
        raise ZeroDivisionError  # a bug stays one
    assert list(tmp_path.iterdir()) == []


def test_partial_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_text(path, "one\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, hard))  # three bytes of the next line fit
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: no space left"):
            append_text(path, "two two\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.read_text() == "one\n"


@pytest.mark.parametrize("content", ["", "half", "one\n", "one\nhalf", "half" * 2**19, "one\n" + "x" * 2**20, "\n"])
def test_half_line_is_cut_off(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lines"
    path.write_text(content)
    drop_half_line(path)
    assert path.read_text() == content[: content.rfind("\n") + 1]


def test_free_space_is_checked_before_writing(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(
        UserError, match=r"out cannot be written: no space left on the disk \(about 1024.0 TiB are needed"
    ):
        require_space(tmp_path / "out", 2**50)


@pytest.mark.parametrize("place", ["/proc/out", "/proc/self/out", "/dev/null/out", "file/out"])
def test_unwritable_paths_are_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / place
    for action in (require_empty, lambda f: published_folder(f).__enter__(), lambda f: write_text(f / "x", "x")):
        with pytest.raises(UserError, match=r"cannot be (written|read)"):
            action(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- JSON


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"), (b'{"a": [1, 2', "if it is truncated"), (b"\x80\x00\xff", "not valid JSON"),
        (b"[" * 200_000, "nested too deeply|not valid JSON"), (b"[1]", "found a list, expected a JSON object"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON .*digits"),
        (b'{"b": {}}', "missing a"), (b'{"a": {}, "b": "x"}', 'b is "x", expected a number'),
        (b'{"a": true, "b": 1}', "a is true, expected an object or a list"),
    ],
)  # fmt: skip
def test_json_names_file_key_and_type(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected) as error:
        read_object(path, {"a": (dict, list), "b": float}, required=("a",))
    assert str(path) in str(error.value)


def test_json_has_no_nan(tmp_path: Path) -> None:
    """Which is Python's own; other readers refuse the file."""
    value = {"ci95": (float("nan"), 1.5), "all": [{"x": float("-inf")}], "n": 3, "flag": True}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "ci95": [None, 1.5],
        "all": [{"x": None}],
        "n": 3,
        "flag": True,
    }


def test_missing_and_huge_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    with pytest.raises(UserError, match=r"x does not exist$"):
        read_json(tmp_path / "x")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"found 1.0 TiB, expected a JSON file"):
        read_json(tmp_path / "huge")
    assert check_object({"a": None, "n": 3, "x": 1}, "here", {"a": dict, "n": float}) == {"a": None, "n": 3, "x": 1}


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_object(tmp_path / "x.json") == {"a": 1}
