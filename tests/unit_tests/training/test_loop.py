"""What the loop tells the trainer of a run that is saved into the folder of an earlier one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.config import ParallelConfig, TrainConfig
from megatron_spec.runtime import distributed
from megatron_spec.training.loop import Position, train
from megatron_spec.training.step import StepResult
from tests.tiny import make_batch


class Nothing:
    """Every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize(
    ("position", "expected", "told"),
    [
        (Position(100, 0, 100), [0, 1, 2], ""),
        (Position(102, 4, 100), [2], ""),
        (Position(103, 6, 100), [], "nothing is trained: this run has done 3 steps"),
        (Position(5, 10, 0), [], "this run has done 5 steps, beyond the 3 of --train-iters"),
    ],
)
def test_a_schedule_of_the_objective_begins_with_the_run(
    position: Position, expected: list[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the learning rate does, whatever else the folder holds. A run that is complete says so."""
    world = distributed.initialize(ParallelConfig())
    seen: list[int] = []

    def step(features: Any, *_: Any) -> StepResult:
        """Note the iteration."""
        seen.append(trainer.iteration)
        return StepResult(torch.ones(5, 1, dtype=torch.float64), torch.zeros(()), 0.0)

    trainer: Any = SimpleNamespace(
        world=world, iteration=0, step=step, optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}])
    )
    loader: Any = SimpleNamespace(step=lambda _: [make_batch(1, 8, seed=0)])
    source: Any = SimpleNamespace(features=lambda batches, _: batches)
    config = TrainConfig(train_iters=3, global_batch_size=2, log_interval=100)
    nothing: Any = Nothing()
    assert train(trainer, loader, source, config, nothing, position, nothing)
    assert seen == expected and told in caplog.text and bool(told) == bool(caplog.records)
    distributed.shutdown()
