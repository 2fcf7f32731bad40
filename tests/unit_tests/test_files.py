"""Folders appear whole or not at all, and what killed runs left goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.runtime.files import published_folder


def test_leftovers_of_killed_runs_go_and_others_stay(tmp_path: Path) -> None:
    for name in (".out.tmp-1", ".out.tmp-22", ".out.tmp-mine", ".outer.tmp-1", ".other.tmp-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    with published_folder(tmp_path / "out") as temporary:
        (temporary / "file").write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.tmp-1", ".out.tmp-mine", ".outer.tmp-1", "out"]
    assert (tmp_path / "out" / "file").read_text() == "whole"


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
