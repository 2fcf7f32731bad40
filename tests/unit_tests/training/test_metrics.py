"""Names, values and destinations of a step's metrics."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.drafts.contract import DraftLosses
from megatron_spec.training.metrics import (
    name_metrics,
    pack,
    predicted_acceptance_length,
    truncate_log,
    warn_uncounted,
)
from megatron_spec.training.tracking import Progress, Rate, Tracker, check, flatten


@pytest.mark.parametrize(
    ("shares", "expected"), [([], 1.0), ([0.0, 1.0], 1.0), ([1.0, 1.0, 1.0], 4.0), ([0.8, 0.5, 0.25], 2.3)]
)
def test_predicted_acceptance_length(shares: list[float], expected: float) -> None:
    assert predicted_acceptance_length(shares) == pytest.approx(expected)  # 1 + .8 + .8 * .5 + .8 * .5 * .25


def test_sums_become_means_over_rows_of_their_step() -> None:
    sums = torch.tensor([[20.0, 9.0], [8.0, 3.0], [5.0, 1.5], [10.0, 6.0], [4.0, 0.0]], dtype=torch.float64)
    assert name_metrics(sums) == {
        "loss_per_step": [2.0, 1.5],
        "accuracy_per_step": [0.8, 0.5],
        "overlap_per_step": [0.5, 0.25],
        "supervised_rows": 10,
        "counted_share": 0.4,
        "predicted_acceptance_length": pytest.approx(2.2),
        "predicted_acceptance_length_sampling": pytest.approx(1.625),
    }
    assert name_metrics(torch.zeros(5, 2, dtype=torch.float64))["loss_per_step"] == [0.0, 0.0]


def test_rows_outside_the_draft_vocabulary_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rows_T = torch.tensor([10.0, 9.0])
    zeros = torch.zeros(2)
    some = DraftLosses(torch.tensor(1.0), zeros, zeros, zeros, rows_T, torch.tensor(3))
    assert pack(some)[4].tolist() == [3, 0] and pack(dataclasses.replace(some, counted=None))[4].tolist() == [10, 0]
    assert not warn_uncounted(10, 5, "iteration 1")
    assert caplog.text == ""
    assert warn_uncounted(10, 0, "iteration 2")
    assert "only 0.0 % of 10 supervised rows count in the loss at iteration 2" in caplog.text


def test_resumed_log_drops_unsaved_steps(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    truncate_log(log, 3)
    assert not log.exists()
    lines = [json.dumps({"iteration": i, "loss": i / 2}) for i in range(1, 6)]
    log.write_text("\n".join(lines) + '\n{"iteration": 6, "lo')
    truncate_log(log, 3)
    assert log.read_text().splitlines() == lines[:3]
    truncate_log(log, 3)
    assert log.read_text() == "\n".join(lines[:3]) + "\n"


METRICS: dict[str, Any] = {"iteration": 3, "loss": 1.5, "accuracy_per_step": [0.75, 0.5], "note": "text"}


def test_flatten_gives_every_draft_step_a_name() -> None:
    expected = {"iteration": 3, "loss": 1.5, "accuracy_per_step/0": 0.75, "accuracy_per_step/1": 0.5}
    assert flatten(METRICS) == expected


def test_tracker_writes_lines_and_tensorboard_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = Tracker(tmp_path / "run", True, tensorboard_dir=str(tmp_path / "events"))
    for iteration in (1, 2):
        tracker.write({**METRICS, "iteration": iteration, "loss": 1.0 / iteration})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 0.5] and lines[0]["note"] == "text"
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert [e.value for e in events.Scalars("accuracy_per_step/1")] == [0.5, 0.5]


def test_resumed_run_continues_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for wandb: its arguments and its data."""
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, float]] = []
    run = SimpleNamespace(
        log=lambda flat, step: logged.append((step, flat["loss"])), finish=lambda: logged.append((-1, 0))
    )

    def init(**options: Any) -> SimpleNamespace:
        started.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setattr(sys.modules["wandb"], "init", init, raising=False)
    for resumed_at in (0, 3):
        tracker = Tracker(tmp_path, True, resumed_at=resumed_at, wandb_project="drafts", config={"lr": 0.1})
        tracker.write({**METRICS, "iteration": resumed_at + 1})
        tracker.close()
    assert logged == [(1, 1.5), (-1, 0), (4, 1.5), (-1, 0)]
    assert started[0] == started[1] and started[0]["project"] == "drafts" and started[0]["config"] == {"lr": 0.1}
    assert len(started[0]["id"]) >= 8 and started[0]["resume"] == "allow"


def test_a_resumed_run_hides_the_events_it_repeats(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_at, loss in ((0, 9.0), (1, 1.0)):
        tracker = Tracker(tmp_path / "run", True, resumed_at=resumed_at, tensorboard_dir=str(tmp_path / "events"))
        for iteration in range(resumed_at + 1, 4):
            tracker.write({**METRICS, "iteration": iteration, "loss": loss})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 9.0), (2, 1.0), (3, 1.0)]


def test_missing_packages_are_reported_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check(None, None)
    with pytest.raises(UserError, match=r"--wandb-project needs wandb.*pip install megatron-spec\[tracking\]"):
        check(None, "drafts")
    with pytest.raises(UserError, match="--tensorboard-dir needs tensorboard"):
        check("events", None)


def test_a_silent_tracker_writes_nothing(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", False, tensorboard_dir=str(tmp_path / "events"))
    tracker.write(METRICS)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_progress_line() -> None:
    metrics = {
        "iteration": 5, "loss": 2.0, "accuracy_per_step": [0.5, 0.25], "predicted_acceptance_length": 1.625,
        "lr": 1e-4, "grad_norm": 0.3, "tokens_per_second": 1000.0,
    }  # fmt: skip
    line = Progress(10, 0).line(metrics)
    assert "step 5/10" in line and "accuracy % [50 25]" in line and "predicted acceptance length 1.62" in line


def test_the_speed_of_the_last_step_counts_its_features() -> None:
    """Three steps of 10 tokens, 1 s of the base and 1 s of the draft each; a step computes the features of the next."""
    rate = Rate()
    assert [rate.of(10, 3.0, False), rate.of(10, 2.0, False), rate.of(10, 1.0, True)] == [10 / 3, 5.0, 5.0]
    assert Rate().of(10, 2.0, True) == 5.0
