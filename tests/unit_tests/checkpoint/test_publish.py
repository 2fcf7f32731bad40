"""A kill at any moment of a save leaves a complete checkpoint, and nothing that looks complete and is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import POINTER, latest_iteration, resolve


def write_iteration(folder: Path, content: str) -> Path:
    (folder / "dist").mkdir(parents=True)
    for name in ("spec.json", "vocab.safetensors", "dist/metadata.json"):
        (folder / name).write_text(content)
    return folder


class Killed(BaseException):
    """Stands for SIGKILL: nothing behind it runs."""


@pytest.mark.parametrize("same", [False, True], ids=["next iteration", "the same iteration again"])
def test_every_moment_of_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    calls = {"count": 0, "die_at": 0}

    def dying(original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            calls["count"] += 1
            if calls["count"] == calls["die_at"]:
                raise Killed
            return original(*args, **kwargs)

        return step

    replace, remove, write = os.replace, shutil.rmtree, sharded.write_text
    moments = 0
    for moment in range(1, 12):
        root = tmp_path / str(moment)
        write_iteration(root / "iter_0000001", "one")
        write_iteration(root / "iter_0000002", "two")
        (root / POINTER).write_text("2\n")
        final = root / ("iter_0000002" if same else "iter_0000003")
        temporary = write_iteration(root / f".{final.name}.tmp", "new")
        calls.update(count=0, die_at=moment)
        with monkeypatch.context() as patch:
            patch.setattr(sharded.os, "replace", dying(replace))
            patch.setattr(sharded.shutil, "rmtree", dying(remove))
            patch.setattr(sharded, "write_text", dying(write))
            try:
                sharded.publish(temporary, final, keep=2)
                break
            except Killed:
                moments += 1
        found = resolve(root)
        assert (found / "spec.json").read_text() in ("one", "two", "new"), moment
        assert {(found / n).read_text() for n in ("vocab.safetensors", "dist/metadata.json")} == {
            (found / "spec.json").read_text()
        }
    assert moments >= 4, "the test must have killed it at several moments"
    assert (resolve(root) / "spec.json").read_text() == "new" and latest_iteration(root) == (2 if same else 3)
    assert sorted(p.name for p in root.glob("*iter_*")) == [f"iter_000000{i}" for i in ((1, 2) if same else (2, 3))]
