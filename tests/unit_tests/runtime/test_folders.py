"""Output folders: what they may hold before a run, and how a new one takes the place of an old one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.runtime import folders
from megatron_spec.runtime.folders import published_folder, require_empty


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it changes a file."""


def dies_at(moment: int, patch: pytest.MonkeyPatch) -> None:
    """The process dies at its `moment`-th change of a name; then it changes nothing any more."""
    count = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= moment:
                raise Killed
            return call(*args, **kwargs)

        return step

    for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
        patch.setattr(module, name, dying(getattr(module, name)))


def write(folder: Path, content: str, **options: Any) -> None:
    with published_folder(folder, overwrite=True, **options) as new:
        (new / "file").write_text(content)


def test_a_kill_at_any_moment_loses_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start, of another process, finds the old folder or the new one, and leaves nothing else."""
    for moment in range(1, 9):
        folder = tmp_path / str(moment) / "out"
        write(folder, "old")
        with monkeypatch.context() as patch:
            dies_at(moment, patch)
            try:
                write(folder, "new")
                break
            except Killed:
                pass
        monkeypatch.setattr("megatron_spec.runtime.temporary.process_exists", lambda pid: False)
        with pytest.raises(ZeroDivisionError), published_folder(folder, overwrite=True):
            assert (folder / "file").read_text() in ("old", "new"), moment
            raise ZeroDivisionError
        assert [p.name for p in folder.parent.iterdir()] == ["out"], moment
    assert moment == 5, "two renames, and the removal of two folders"
    assert (folder / "file").read_text() == "new"


def test_a_rename_that_fails_gives_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "old")

    def busy(*_: Any) -> None:
        raise OSError(16, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "rename", busy)
        with pytest.raises(UserError, match=r"out cannot be written \(Device or resource busy\)"):
            write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_another_process_has_published_meanwhile_is_kept(tmp_path: Path) -> None:
    """It may be reading it. A folder that lacks the last file is replaced."""
    with published_folder(tmp_path / "out", overwrite=True, unless="file") as slow:
        (slow / "file").write_text("slow")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("fast")
    assert (tmp_path / "out" / "file").read_text() == "fast"
    (tmp_path / "out" / "file").unlink()
    write(tmp_path / "out", "again", unless="file")
    assert (tmp_path / "out" / "file").read_text() == "again" and len(list(tmp_path.iterdir())) == 1


def test_two_that_write_one_new_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="out was written by another run meanwhile"), published_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_hidden_files_of_a_folder_that_is_replaced(tmp_path: Path) -> None:
    """They are the user's: a repository that was just cloned has only such."""
    (tmp_path / "out" / ".git").mkdir(parents=True)
    require_empty(tmp_path / "out")
    with pytest.raises(UserError, match=r"out is not empty \(it has .git\)"), published_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / ".git").is_dir()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/out")
    for content in ("one", "two"):
        write(tmp_path / "out", content)
        assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "out" / "file").read_text() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["disk", "file", "out", "out"]


def test_mount_points_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(UserError, match="is a mount point, which no folder can replace: choose a folder in it"):
        require_empty(tmp_path, replaced=True)
    require_empty(tmp_path)
    require_empty(tmp_path / "out", replaced=True)
