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
        assert [*rows] == [
            "one GPU, halved", "no sums", "no sums, gradients after", "no sums, 2 pieces", "all-reduce",
            "all-reduce, gradients after", "all-reduce, 2 pieces",
        ]  # fmt: skip
        assert [*rows["all-reduce, 2 pieces"]] == ["base, a layer"]
        assert [*rows["no sums, gradients after"]] == ["draft, a step"]
        assert all(ms > 0 for row in rows.values() for ms in row.values())
