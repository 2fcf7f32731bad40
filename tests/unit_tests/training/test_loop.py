"""What the loop tells the trainer of a run that is saved into the folder of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.config import ParallelConfig, TrainConfig
from megatron_spec.runtime import distributed
from megatron_spec.training.loop import Position, train
from megatron_spec.training.step import NonFiniteLossError, StepResult
from tests.tiny import make_batch


class Nothing:
    """Every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def fake(step: Any) -> Any:
    """A trainer with this step."""
    world = distributed.initialize(ParallelConfig())
    return SimpleNamespace(
        world=world, iteration=0, step=step, prepare=list, optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}])
    )


LOADER: Any = SimpleNamespace(step=lambda _: [make_batch(1, 8, seed=0)])
SOURCE: Any = SimpleNamespace(features=lambda batches, _: batches)


@pytest.mark.parametrize(
    ("position", "expected", "told"),
    [
        (Position(100, 0, 100), [0, 1, 2], ""),
        (Position(102, 4, 100), [2], ""),
        (Position(103, 6, 100), [], "nothing is left to train: this run has done 3 steps"),
        (Position(5, 10, 0), [], "this run has done 5 steps, beyond the 3 of --train-iters"),
    ],
)
def test_a_schedule_of_the_objective_begins_with_the_run(
    position: Position, expected: list[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the learning rate does, whatever else the folder holds. A run that is complete says so."""
    seen: list[int] = []

    def step(features: Any, *_: Any) -> StepResult:
        """Note the iteration."""
        seen.append(trainer.iteration)
        return StepResult(torch.ones(5, 1, dtype=torch.float64), torch.zeros(()), 0.0)

    trainer = fake(step)
    config = TrainConfig(train_iters=3, global_batch_size=2, log_interval=100)
    nothing: Any = Nothing()
    assert train(trainer, LOADER, SOURCE, config, nothing, position, nothing)
    assert seen == expected and told in caplog.text and bool(told) == bool(caplog.records)
    distributed.shutdown()


@pytest.mark.parametrize(
    ("error", "ranks", "expected"),
    [
        (NonFiniteLossError("nan"), 2, ["save", "wait"]),
        (RuntimeError("one rank alone"), 2, ["save"]),
        (RuntimeError("the only rank"), 1, ["save", "wait"]),
    ],
    ids=str,
)
def test_an_error_that_all_ranks_raise_ends_the_run_after_its_save(
    error: Exception, ranks: int, expected: list[str]
) -> None:
    """The checkpoint that is being written is the last good one."""
    calls: list[str] = []
    saver: Any = SimpleNamespace(
        save=lambda _: calls.append("save"), poll=lambda: None, wait=lambda: calls.append("wait")
    )

    def step(*_: Any) -> StepResult:
        """Fail after the first save."""
        if calls:
            raise error
        return StepResult(torch.ones(5, 1, dtype=torch.float64), torch.zeros(()), 0.0)

    config = TrainConfig(train_iters=3, global_batch_size=2, log_interval=100, save_interval=1)
    nothing: Any = Nothing()
    trainer = fake(step)
    trainer.world = replace(trainer.world, size=ranks)
    with pytest.raises(type(error)):
        train(trainer, LOADER, SOURCE, config, nothing, Position(), saver)
    assert calls == expected
    distributed.shutdown()
