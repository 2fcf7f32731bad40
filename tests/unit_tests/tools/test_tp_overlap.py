"""The comparison of sums over tensor parallel ranks runs without GPUs, on what runs there."""

from __future__ import annotations

from typing import Any

from benchmarks import measure_overlap, tp_overlap
from tests.worlds import run_world


def tiny() -> dict[str, Any]:
    return tp_overlap.main(["--tiny", "--rounds", "1"])


def test_tiny() -> None:
    for found in run_world(2, tiny):
        assert set(found["parts"]) == set(measure_overlap.PARTS) == set(found["half"])
        rows = found["sums"]
        assert [name for name in rows if "pieces" not in name] == ["one GPU, halved", "no sums", "all-reduce"]
        assert all(ms > 0 for row in rows.values() for ms in row.values())
