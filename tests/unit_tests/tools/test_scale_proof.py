"""The driver of scale.py: a layout that crashes is reported, the others continue; and the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import measure_layouts, scale, scale_proof

CHILD = """
import json, sys
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    if name == "broken":
        raise SystemExit("no such luck")
    print("a warning\\n" + json.dumps({"layout": name}), flush=True)
"""


def test_other_layouts_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(scale_proof, "SCRIPT", tmp_path / "child.py")
    findings, failures = scale_proof.run(1, ["tp2", "broken", "dp2"], [])
    assert [f["layout"] for f in findings] == ["tp2", "dp2"]
    assert failures == ["broken: no such luck"]


def test_tables() -> None:
    one = {"layout": "one@16384x1", "gpus": 1, "tokens_per_second": 100.0, "tokens_per_second_per_gpu": 100.0}
    two = {"layout": "cp2@16384x1", "gpus": 2, "tokens_per_second": 180.0, "tokens_per_second_per_gpu": 90.0}
    differences = {"loss_difference": 1e-9, "gradient_difference": 2e-7}
    text = scale_proof.tables({
        "equality": [{"layout": "cp2", "dtype": "float32", **differences}],
        "speed": [{**e, "peak_gib": 30.0} for e in (one, two)], "failed": ["equality tp2te: why"],
    })  # fmt: skip
    assert "| cp2 | 1.0e-09 | 2.0e-07 |  |  |  |" in text
    assert "| cp2@16384x1 | 180 | 90 | 90.0% | 30.0 |" in text and "failed: equality tp2te: why" in text


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_parallelism_is_tested(gpus: int) -> None:
    equal, fast = scale_proof.layouts(gpus, engine=True)
    for wanted in ("tp", "pp", "dp", "cp"):
        assert f"{wanted}{gpus}" in equal and any(name.startswith(wanted) for name in fast)
    assert f"tp{gpus}sp" in equal and f"tp{gpus}te" in equal and len(set(equal)) == len(equal)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for a CPU")
def test_tiny_throughput() -> None:
    found = measure_layouts.speed("one", scale.parse(["one", "--tiny", "--no-equality"]))
    assert found["tokens_per_second"] == found["tokens_per_second_per_gpu"] > 0
    assert (found["model"], found["gpus"], found["seq_length"]) == ("tiny", 1, 64)


def test_flags_that_all_layouts_set_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.parse(["--gpus", "2", "--tiny", "--without", "draft_fused"]).gpus == 2
    with pytest.raises(SystemExit) as left:
        scale.parse(["--gpus", "2", "--steps", "9", "--model", "70b"])
    assert left.value.code == 2 and "leave out --model, --steps" in capsys.readouterr().err


def test_layouts_are_chosen_by_name() -> None:
    equal, fast = scale_proof.layouts(2, engine=False)
    chosen = scale_proof.Chosen(2, ["speed"], ["tp2", "cp2"], tiny=False)
    chosen.check(equal, fast)
    assert chosen.of(equal) == ["tp2", "cp2"] and chosen.of(fast) == ["tp2", "cp2@16384x1"]
    assert scale_proof.Chosen(2, [], None, False).of(fast) == fast
    with pytest.raises(SystemExit, match="found tp4, expected some of tp2"):
        scale_proof.Chosen(2, ["speed"], ["tp4"], tiny=False).check(equal, fast)
