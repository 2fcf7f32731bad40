"""The training loop: data order is a pure function of samples consumed, so a killed run resumes exactly.

All randomness of a step is derived from (seed, iteration), so the position includes the random state.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_spec.batch import Batch
from megatron_spec.config import TrainConfig
from megatron_spec.data.loader import BatchLoader
from megatron_spec.features.ahead import FeaturesAhead
from megatron_spec.features.base import FeatureSource
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.platform import to_device
from megatron_spec.training.metrics import name_metrics
from megatron_spec.training.step import NonFiniteLossError, StepResult, Trainer
from megatron_spec.training.tracking import Progress, Rate, Tracker

log = logging.getLogger(__name__)


@dataclass
class Position:
    """Position of a run: with draft and optimizer, everything needed to continue it exactly."""

    iteration: int = 0
    consumed_samples: int = 0
    begun_at: int = 0
    """Iteration of the checkpoint that the run started from, when it is saved into the same folder."""

    @property
    def done(self) -> int:
        """Steps done by this run."""
        return self.iteration - self.begun_at

    def state(self) -> dict[str, int]:
        """The fields saved in a checkpoint."""
        return {"iteration": self.iteration, "consumed_samples": self.consumed_samples, "begun_at": self.begun_at}


class Saver(Protocol):
    """Writes checkpoints, synchronously or in the background. Every method is a collective."""

    def save(self, position: Position) -> None:
        """Write a checkpoint, or start writing it."""
        ...

    def poll(self) -> None:
        """Publish a checkpoint once it is written."""
        ...

    def wait(self) -> None:
        """Block until every checkpoint is complete."""
        ...


Evaluate = Callable[[int, bool, Callable[[], bool]], bool]
"""Called with the iteration, whether it is the last one, and a function that tells whether a signal asks this rank to
end. Returns False, on every rank, if a signal ended it without a result."""


@dataclass
class StopSignal:
    """SIGTERM, SIGUSR1 (SLURM preemption) or Ctrl-C: finish the step, save, exit. All ranks act on it in the same step.

    A second Ctrl-C ends the process at once (KeyboardInterrupt).
    """

    received: bool = False
    launcher_repeats: float = 1.0
    """Seconds in which another SIGINT is the same Ctrl-C: the terminal sends it, and torchrun passes it on as well."""
    _first: float | None = None
    _old: dict[int, Any] = field(default_factory=dict)
    _asked: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._old[number] = signal.signal(number, self._set)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first is not None and now - self._first >= self.launcher_repeats:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first

    def agreed(self, device: torch.device) -> bool:
        """True on every rank if any rank got the signal; called once per step.

        On a GPU this is the result of the previous step, which needs no device synchronisation.
        """
        flag = to_device(torch.tensor(float(self.received)), device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if device.type != "cuda":
            return bool(flag.item())
        answer, done = torch.empty((), pin_memory=True), torch.cuda.Event()
        answer.copy_(flag, non_blocking=True)
        done.record()
        before, self._asked = self._asked, (answer, done)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def train(
    trainer: Trainer, loader: BatchLoader, source: FeatureSource, train: TrainConfig, tracker: Tracker,
    position: Position, saver: Saver, evaluate: Evaluate | None = None,
) -> bool:  # fmt: skip
    """Train from `position` to train.train_iters, saving at intervals and at the end.

    `evaluate` runs after every step and its checkpoint, but not when a signal ends the run; it is called again where a
    run resumes.

    Returns True when the run is complete, False when a signal ended it early (after a save).
    Raises NonFiniteLossError, with the iteration and the samples of the batch, when loss or gradient are not finite.
    """
    last = position.begun_at + train.train_iters
    progress, rate = Progress(last, position.iteration), Rate()
    first, left, size = position.consumed_samples, last - position.iteration, train.global_batch_size
    if left <= 0 and trainer.world.rank == 0:
        beyond = f", beyond the {train.train_iters} of --train-iters" if left < 0 else ""
        log.warning("nothing is left to train: this run has done %d steps%s", position.done, beyond)
    steps = (trainer.prepare(loader.step(first + i * size)) for i in range(left))
    with (
        StopSignal() as stop,
        closing(FeaturesAhead(source, steps, trainer.world.pp_size, train.features_ahead)) as ahead,
        _save_in_flight_kept(saver, trainer.world),
    ):
        whole = not position.done or _evaluated(evaluate, position, left <= 0, stop)
        while whole and position.iteration < last:
            begin = time.monotonic()
            torch.manual_seed(train.seed * 1_000_003 + position.done)
            trainer.iteration = position.done
            batches, features, count = ahead.step()
            describe = f"iteration {position.iteration + 1}, samples {_numbers(batches)}"
            result = trainer.step(features, describe, count, ahead.prepare)
            position.iteration += 1
            position.consumed_samples += train.global_batch_size
            tokens = sum(b.num_tokens for b in batches) * trainer.world.dp_size
            speed = rate.of(tokens, time.monotonic() - begin, ahead.drained)
            _report(result, trainer, position, speed, train, tracker, progress)
            ended = position.iteration == last
            stopping = stop.agreed(trainer.world.device)
            saver.poll()
            if ended or stopping or (train.save_interval and position.done % train.save_interval == 0):
                saver.save(position)
            if ended or stopping:
                saver.wait()
            whole = ended and evaluate is None if stopping else _evaluated(evaluate, position, ended, stop)
        if not whole:
            saver.save(position)
            saver.wait()
            log.warning("stopped by a signal at iteration %d: start again to continue", position.iteration)
    return whole


def _evaluated(evaluate: Evaluate | None, position: Position, last: bool, stop: StopSignal) -> bool:
    return evaluate is None or evaluate(position.iteration, last, lambda: stop.received)


@contextmanager
def _save_in_flight_kept(saver: Saver, world: World) -> Iterator[None]:
    """An error ends the run only after the save in flight, if every rank raises it: to publish is a collective."""
    try:
        yield
    except Exception as error:
        if world.size == 1 or isinstance(error, NonFiniteLossError):
            saver.wait()
        raise


def _numbers(batches: Sequence[Batch]) -> str:
    """Numbers of the samples in the rows of some micro-batches, as read from the data: '3, 7+8' (packed)."""
    return ", ".join("+".join(map(str, row)) for batch in batches for row in batch.sample_ids or ())


def _report(
    result: StepResult, trainer: Trainer, position: Position, tokens_per_second: float, train: TrainConfig,
    tracker: Tracker, progress: Progress,
) -> None:  # fmt: skip
    metrics: dict[str, Any] = {
        "iteration": position.iteration,
        "consumed_samples": position.consumed_samples,
        "loss": float(result.loss),
        **name_metrics(result.sums),
        "grad_norm": result.grad_norm,
        "lr": float(trainer.optimizer.param_groups[0]["lr"]),
        "tokens_per_second": tokens_per_second,
    }
    if torch.cuda.is_available():
        metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    tracker.write(metrics)
    if position.iteration % train.log_interval == 0 or position.done == train.train_iters:
        log.info(progress.line(metrics))
