"""A kill at any point of a save leaves a complete checkpoint, and no incomplete one that looks complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import POINTER, latest_iteration, locked, resolve
from megatron_spec.config import UserError
from megatron_spec.runtime import folders


def write_iteration(folder: Path, content: str) -> Path:
    (folder / "dist").mkdir(parents=True)
    for name in ("spec.json", "vocab.safetensors", "dist/metadata.json"):
        (folder / name).write_text(content)
    return folder


class Killed(BaseException):
    """Stands for SIGKILL: nothing runs after it."""


@pytest.mark.parametrize("iteration", [3, 2], ids=["next iteration", "the same iteration again"])
@pytest.mark.parametrize("kept", [(1, 2), (2,)], ids=["two", "one"])
def test_every_step_of_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int, kept: tuple[int, ...]
) -> None:
    calls = {"count": 0, "die_at": 0}

    def dying(original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            calls["count"] += 1
            if calls["count"] == calls["die_at"]:
                raise Killed
            return original(*args, **kwargs)

        return step

    calls_that_change = [(os, "rename"), (folders, "rename"), (shutil, "rmtree"), (sharded, "write_text")]
    moments = 0
    for moment in range(1, 12):
        root = tmp_path / str(moment)
        for number in kept:
            write_iteration(root / f"iter_000000{number}", str(number))
        (root / POINTER).write_text("2\n")
        final = root / f"iter_000000{iteration}"
        temporary = write_iteration(root / f".{final.name}.tmp", "new")
        calls.update(count=0, die_at=moment)
        with monkeypatch.context() as patch:
            for module, name in calls_that_change:
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                sharded.publish(temporary, final, keep=2)
                break
            except Killed:
                moments += 1
        if not final.exists() and kept == (iteration,):
            with pytest.raises(UserError, match=r"iter_0000002 was being saved again .*rename .*aside to it"):
                resolve(root)
            sharded.remove_leftovers(root)  # what the next save does
        found = resolve(root)
        assert (found / "spec.json").read_text() in ("1", "2", "new"), moment
        assert {(found / n).read_text() for n in ("vocab.safetensors", "dist/metadata.json")} == {
            (found / "spec.json").read_text()
        }
    assert moments >= 2, "the test must have killed it at several moments"
    assert (resolve(root) / "spec.json").read_text() == "new" and latest_iteration(root) == iteration
    expected = sorted({*kept, iteration})[-2:]
    assert sorted(p.name for p in root.iterdir()) == [f"iter_000000{i}" for i in expected] + [POINTER]


def test_iterations_of_earlier_runs_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        write_iteration(tmp_path / f"iter_000000{number}", str(number))
    sharded.publish(write_iteration(tmp_path / ".new.tmp", "new"), tmp_path / "iter_0000005", keep=2, keep_until=2)
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == [f"iter_000000{i}" for i in (1, 2, 4, 5)]


def test_the_first_iteration_counts_without_its_pointer(tmp_path: Path) -> None:
    write_iteration(tmp_path / "iter_0000003", "three")
    (tmp_path / "iter_0000004").mkdir()  # not complete
    assert latest_iteration(tmp_path) == 3 and resolve(tmp_path).name == "iter_0000003"
    (tmp_path / POINTER).write_text("9\n")  # gone
    assert resolve(tmp_path).name == "iter_0000003"
    write_iteration(tmp_path / "iter_0000005", "five")
    (tmp_path / POINTER).write_text("3\n")  # set back by hand
    assert resolve(tmp_path).name == "iter_0000003"
    for text in ("", "x", "-1", "²"):
        (tmp_path / POINTER).write_text(text)
        with pytest.raises(UserError, match="should hold an iteration number"):
            resolve(tmp_path)


def test_an_iteration_that_is_gone(tmp_path: Path) -> None:
    write_iteration(tmp_path / "iter_0000003", "three")
    with pytest.raises(UserError, match=r"iter_0000002: no such folder; it may have been removed .*--ckpt-keep"):
        resolve(tmp_path / "iter_0000002")
    with pytest.raises(UserError, match=r"other: no such folder$"):
        resolve(tmp_path / "other")


def test_an_iteration_that_is_read_is_not_removed(tmp_path: Path) -> None:
    for number in (1, 2):
        write_iteration(tmp_path / f"iter_000000{number}", str(number))
    (tmp_path / POINTER).write_text("1\n")
    with locked(tmp_path) as folder:
        assert folder.name == "iter_0000001"
        sharded.publish(write_iteration(tmp_path / ".iter_0000003.tmp", "new"), tmp_path / "iter_0000003", keep=1)
        assert folder.is_dir() and not (tmp_path / "iter_0000002").exists()
        shutil.rmtree(folder)  # where locks do not reach
        with pytest.raises(UserError, match="was removed while it was read"):
            sharded.read_extra(folder)
    sharded.publish(write_iteration(tmp_path / ".iter_0000004.tmp", "new"), tmp_path / "iter_0000004", keep=1)
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == ["iter_0000004"]
