"""One optimizer step: features of this rank's micro-batches -> draft losses -> summed gradients -> update.

Plain code, no pipeline schedule: the base already ran, so every rank trains the draft on the micro-batches it owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import ObjectiveConfig
from megatron_spec.distributed import World
from megatron_spec.drafts.base import BaseEnds
from megatron_spec.training.metrics import pack, reduce_sums
from megatron_spec.training.optimizer import finish_gradients


class NonFiniteLossError(RuntimeError):
    """The loss of a step is not a number: training on would only destroy the draft."""


@dataclass
class StepResult:
    """Reduced sums [4, T] (loss, correct, overlap, rows), the loss that was minimised, and the gradient norm."""

    sums: Tensor
    loss: Tensor
    grad_norm: float


@dataclass
class Trainer:
    """Everything one step needs; the draft is trained in place."""

    world: World
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ends: BaseEnds
    objective: ObjectiveConfig

    def backward(self, features: Sequence[Features]) -> tuple[Tensor, Tensor]:
        """Accumulate gradients over micro-batches; reduce sums and gradients.

        Returns the reduced sums [4, T] and the loss: weighted step losses per supervised row of step 0.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = torch.zeros(5, self.objective.ttt_steps, dtype=torch.float64, device=self.world.device)
        for i, micro_batch in enumerate(features):
            last = i == len(features) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                losses = self.ddp(micro_batch, self.ends, self.objective)
                losses.total.backward()
            sums[:4] += pack(losses)
            sums[4, 0] += losses.total.detach()
        reduce_sums(sums, self.world.draft_dp)
        rows = sums[3, 0]
        # A step without any supervised row changes nothing, so the division must not make it NaN.
        finish_gradients(self.ddp, self.world, rows.clamp(min=1).to(torch.float32))
        return sums[:4], sums[4, 0] / rows.clamp(min=1)

    def step(self, features: Sequence[Features], describe: str = "") -> StepResult:
        """One optimizer step. Raises NonFiniteLossError naming `describe` (the batch) instead of updating with NaN."""
        sums, loss = self.backward(features)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss.item()} at {describe}: nothing was updated")
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return StepResult(sums, loss, float(grad_norm or 0.0))
