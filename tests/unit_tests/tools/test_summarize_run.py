"""Table and summary.json of a chain run, from files as written by the scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from tools.summarize_run import final_metrics, summarize, table


def report(length: float, dtype: str, wrong: int) -> dict[str, Any]:
    return {
        "acceptance_length": length, "ci95": [length - 0.1, length + 0.1], "acceptance_per_position": [0.5, 0.25],
        "text_identical": not wrong, "mismatches": [{}] * (wrong + 1), "differences": wrong, "exact_ties": 1,
        "near_ties": 0, "answers": 4,
        "about": {"dtype": dtype},
        "base": {"tokens_per_second": 10.0}, "speculative": {"tokens_per_second": 15.0},
    }  # fmt: skip


def step(loss: float, rows: int) -> str:
    return json.dumps({"loss_per_step": [loss], "accuracy_per_step": [loss / 10], "supervised_rows": rows})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / ".stages").mkdir()
    (tmp_path / ".stages" / "finetune").write_text("12.5\n")
    (tmp_path / ".stages" / "qat").write_text("2.5\n")
    for name in ("finetuned", "qat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([step(100.0, 50), *[step(1.0, 1)] * 4, step(3.0, 4)]))
    (tmp_path / "validate_bf16.json").write_text(json.dumps(report(1.75, "bfloat16", 0)))
    (tmp_path / "validate_fp8.json").write_text(json.dumps(report(1.5, "float64", 1)))
    return tmp_path


def test_the_summary_has_what_the_table_shows(run: Path) -> None:
    summary = summarize(run)
    assert (summary["acceptance_length_bf16"], summary["acceptance_length_fp8"]) == (1.75, 1.5)
    assert summary["text_identical"] and not summary["text_identical_fp8"]
    assert summary["seconds_per_stage"] == {"finetune": 12.5, "qat": 2.5} and summary["seconds_total"] == 15.0
    assert Path(summary["export_dir"]) == (run / "export").resolve()
    text = table(summary)
    assert "computed in bfloat16; fp8 is simulated in float64" in text
    assert "greedy text: yes, all 4 answers" in text and "NO, 1 of 4 answers differ" in text


def test_last_steps_are_weighted_by_supervised_rows(run: Path) -> None:
    """(1 + 1 + 1 + 1 + 3 * 4) / 8: the first line is not among the last five."""
    assert final_metrics(run / "finetuned") == {"loss_per_step": [2.0], "accuracy_per_step": [pytest.approx(0.2)]}


def test_unfinished_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the chain did not finish"):
        final_metrics(tmp_path)


def test_a_chain_without_fp8_and_with_a_lookup(run: Path) -> None:
    (run / "validate_fp8.json").rename(run / "validate_lookup.json")
    summary = summarize(run)
    assert summary["acceptance_length_lookup"] == 1.5 and not any("fp8" in key for key in summary)
    text = table(summary)
    assert "acceptance length with a lookup 1.500" in text and "loss fp8" not in text and "fp8:" not in text
