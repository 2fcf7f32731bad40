"""One optimizer step: features of this rank's micro-batches -> draft losses -> summed gradients -> update.

Plain code, no pipeline schedule: the base already ran, so every rank trains the draft on the micro-batches it owns.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_spec.batch import Batch, Features
from megatron_spec.config import ObjectiveConfig
from megatron_spec.drafts.contract import BaseEnds
from megatron_spec.ops import backend
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.platform import Aside, to_host
from megatron_spec.training.metrics import pack, reduce_sums, warn_uncounted
from megatron_spec.training.one_pass import OnePass, parts
from megatron_spec.training.optimizer import finish_gradients, scale_gradients

log = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient of a step is not a number: further training would destroy the draft."""


@dataclass
class StepResult:
    """Reduced sums [5, T] of `metrics.pack`, the loss that was minimised, both on the host, and the gradient norm
    before clipping."""

    sums: Tensor
    loss: Tensor
    grad_norm: float


@dataclass
class Trainer:
    """Runs training steps; the draft is updated in place."""

    world: World
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ends: BaseEnds
    objective: ObjectiveConfig
    iteration: int = 0
    """Steps that this run has done: a part of the objective may change with it."""
    warned: bool = False
    """The warning about rows that the draft vocabulary leaves out was given: it would be the same at every step."""

    def prepare(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of a later step, on which the draft may begin to work (`Draft.prepare`)."""
        for batch in batches[self.world.pp_rank :: self.world.pp_size]:
            self.ddp.module.prepare(batch, self.objective)
        return batches

    def backward(self, features: Iterable[Features], count: int | None = None) -> tuple[Tensor, Tensor]:
        """Accumulate gradients over micro-batches; reduce sums and gradients.

        Args:
            features: of this rank's micro-batches; an iterator (`FeaturesAhead.step`) keeps only some in memory.
            count: number of micro-batches; None counts them, which keeps all in memory.

        Returns the reduced sums [5, T] and the loss: weighted step losses per supervised row of step 0. Gradients are
        sums; the step divides them by the rows, `sums[3, 0]`.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = torch.zeros(6, self.objective.ttt_steps, dtype=torch.float64, device=self.world.device)
        if count is None:
            features = list(features)
            count = len(features)
        left, objective = count, self.objective.at(self.iteration)
        with self.ddp.module.weights_fixed():
            for micro_batch in features:
                left -= 1
                with self.ddp.no_sync() if left else contextlib.nullcontext():
                    losses = self.ddp(micro_batch, self.ends, objective)
                    losses.total.backward()
                sums[:5] += pack(losses)
                sums[5, 0] += losses.total.detach()
                del micro_batch, losses  # before the next features are computed
        assert left == 0, (left, count)
        reduce_sums(sums, self.world.draft_dp)
        finish_gradients(self.ddp, self.world)
        return sums[:5], sums[5, 0] / sums[3, 0].clamp(min=1)

    def step(
        self, features: Iterable[Features], describe: str = "this step", count: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepResult:  # fmt: skip
        """One optimizer step. A batch without any supervised row changes neither parameters nor moments.

        The host waits for the device only once, for loss and gradient norm (megatron-core returns it as a number).

        Args:
            features, count: see `backward`.
            describe: description of the batch, for messages.
            meanwhile: called before that wait; what it queues runs on the device while the host reads the norm and
                queues the update.

        Raises NonFiniteLossError when the loss or the gradient norm is not finite; nothing was updated then. All ranks
        raise it, as both are reduced over all.
        """
        sums, loss = self.backward(features, count)
        self.optimizer.prepare_grads()
        for part in self._parts:
            part.prepare()
        aside = self._aside.now()
        meanwhile()
        with aside():
            copied = to_host(torch.cat([sums.flatten(), loss[None]]))  # done before the norm, which the host waits for
            norm = float(self.optimizer.get_grad_norm() or 0.0)
        found = copied()
        sums, loss = found[:-1].view_as(sums), found[-1]
        rows, value = float(sums[3, 0]), float(loss)
        norm /= max(rows, 1.0)
        for what, number in (("loss", value), ("norm of the gradient", norm)):
            if not math.isfinite(number):  # clipping by such a norm would make every parameter NaN
                raise NonFiniteLossError(f"the {what} is {number} at {describe}: nothing was updated")
        if rows:
            self.warned = self.warned or warn_uncounted(rows, float(sums[4, 0]), describe)
            self._update(norm, rows)
        else:
            log.warning("no token is supervised at %s: this step changes nothing", describe)
        self.scheduler.step(increment=1)  # a function of the iteration, so that a resumed run finds the same rate
        return StepResult(sums, loss, norm if rows else 0.0)

    def _update(self, norm: float, rows: float) -> None:
        """AdamW with the prepared gradient sums, divided by the rows and clipped by the norm of what results
        (`optimizer.step` would find it again)."""
        for part in self._parts:
            limit = part.optimizer.config.clip_grad
            scale = min(1.0, limit / (norm + 1e-6)) / rows if limit > 0 else 1.0 / rows
            if not part.step(scale):
                scale_gradients(part.optimizer.get_parameters(), scale)
                part.optimizer.step_with_ready_grads()

    @cached_property
    def _aside(self) -> Aside:
        return Aside(self.world.device)

    @cached_property
    def _parts(self) -> list[OnePass]:
        kind = self.ddp.module.paths.kernels("optimizer_pass")
        kernels = None if kind == "none" else backend.load(kind)
        return [OnePass(part, kernels) for part in parts(self.optimizer)]
