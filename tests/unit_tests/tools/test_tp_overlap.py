"""The comparison of sums over tensor parallel ranks runs without GPUs, on what runs there."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import measure_overlap, tp_overlap
from megatron_spec.runtime import platform
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


@pytest.mark.parametrize(
    "ranks, words, said",
    [
        ("1", ["--tiny"], "found 1 processes, expected 2: start it with torchrun --nproc-per-node 2"),
        ("2", [], "no GPU was found, expected two: --tiny runs in miniature on CPUs"),
    ],
)
def test_refused_before_anything_starts(
    ranks: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(platform, "has_cuda", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tp_overlap.main(words)
    assert capsys.readouterr().err.endswith(f"error: {said}\n")
