"""The journal of a validation outlives a disk that is still full when the run is started again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_spec.evaluation.journal import Journal
from megatron_spec.evaluation.report import Part
from tests.unit_tests.data.chat_fixtures import disk_of


def test_a_full_disk_does_not_cost_the_journal(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(dp_rank=0, tp_rank=0, pp_rank=0, size=1)
    output, path = tmp_path / "report.json", tmp_path / "report.json.part0"
    Journal(output, {"a": 1}, 0, world).add(Part([], [1.0], []))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"half')
    with disk_of(5):
        assert Journal(output, {"a": 1}, 0, world).windows == 1
    assert path.read_bytes() == whole
