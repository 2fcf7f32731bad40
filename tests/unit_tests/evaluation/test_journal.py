"""The journal of a validation outlives a disk that is still full when the run is started again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_spec.evaluation.journal import Journal
from megatron_spec.evaluation.report import Part
from tests.unit_tests.data.chat_fixtures import disk_of

WORLD: Any = SimpleNamespace(dp_rank=0, tp_rank=0, pp_rank=0, size=1)


def test_nothing_is_left_of_a_killed_run_with_more_ranks(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        (tmp_path / f"report.json.part{number}").write_text('{"ranks": 4}\n')
    (tmp_path / "report.json.party").write_text("mine")
    Journal(tmp_path / "report.json", {"ranks": 1}, 0, WORLD).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json.party"]


def test_a_full_disk_does_not_cost_the_journal(tmp_path: Path) -> None:
    output, path = tmp_path / "report.json", tmp_path / "report.json.part0"
    Journal(output, {"a": 1}, 0, WORLD).add(Part([], [1.0], []))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"half')
    with disk_of(5):
        assert Journal(output, {"a": 1}, 0, WORLD).windows == 1
    assert path.read_bytes() == whole
