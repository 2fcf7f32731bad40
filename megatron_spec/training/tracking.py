"""Metrics sinks: metrics.jsonl always, TensorBoard and Weights & Biases on request, progress lines on rank 0."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import append_text, write_text, writing
from megatron_spec.training.metrics import truncate_log

log = logging.getLogger(__name__)


METRICS, WANDB_ID = "metrics.jsonl", "wandb_id.txt"
"""Inside the folder of a run: a line per step, and its identifier there, so that it is resumed in the same plots."""

FILES = {METRICS, WANDB_ID, "wandb"}
"""All that a tracker leaves in the folder of a run."""


def check(tensorboard_dir: str | None, wandb_project: str | None) -> None:
    """Raise UserError if a requested library is not installed, before anything loads."""
    asked = (("--tensorboard-dir", tensorboard_dir, "tensorboard"), ("--wandb-project", wandb_project, "wandb"))
    for flag, value, module in asked:
        if value is not None and importlib.util.find_spec(module) is None:
            raise UserError(f"{flag} needs {module}, which is not installed: pip install megatron-spec[tracking]")


class Tracker:
    """Writes the metrics of one run on rank 0; does nothing on other ranks."""

    def __init__(
        self, folder: Path, active: bool, *, resumed_at: int = 0, tensorboard_dir: str | None = None,
        wandb_project: str | None = None, config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.active, self.path = active, folder / METRICS
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not active:
            return
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        truncate_log(self.path, resumed_at)
        if tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier run wrote after its last save is hidden: those steps run again.
            self._tensorboard = SummaryWriter(tensorboard_dir, purge_step=resumed_at + 1)
        if wandb_project:
            self._wandb = _wandb_run(wandb_project, folder, config or {})

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one step. Lists become one series per draft step."""
        if not self.active:
            return
        append_text(self.path, json.dumps(metrics) + "\n")
        flat = flatten(metrics)
        if self._tensorboard is not None:
            for name, value in flat.items():
                self._tensorboard.add_scalar(name, value, metrics["iteration"])
        if self._wandb is not None:
            self._wandb.log(flat, step=metrics["iteration"])

    def close(self) -> None:
        """Flush and close the writers."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def flatten(metrics: dict[str, Any]) -> dict[str, float]:
    """{'loss_per_step': [a, b]} -> {'loss_per_step/0': a, 'loss_per_step/1': b}."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat.update({f"{name}/{i}": v for i, v in enumerate(value)})
        elif isinstance(value, (int, float)):
            flat[name] = value
    return flat


def _wandb_run(project: str, folder: Path, config: dict[str, Any]) -> Any:
    import wandb

    known = folder / WANDB_ID
    if not known.is_file():
        write_text(known, uuid.uuid4().hex)
    run_id = known.read_text(encoding="utf-8")
    return wandb.init(project=project, dir=str(folder), config=config, id=run_id, resume="allow")


class Rate:
    """Tokens per second of every step: of the step alone while the base runs in each, and of the whole run in the last
    steps, whose features were computed during earlier ones."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def of(self, tokens: int, seconds: float, drained: bool) -> float:
        """Args: drained: no forward of the base is left (`FeaturesAhead.drained`)."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        return self.tokens / self.seconds if drained else tokens / seconds


class Progress:
    """One line per logged step: position, quality, speed and time left."""

    def __init__(self, total: int, first: int) -> None:
        self.total, self.first, self.start = total, first, time.monotonic()

    def line(self, metrics: dict[str, Any]) -> str:
        """The progress line of a step."""
        done = metrics["iteration"] - self.first
        left = (self.total - metrics["iteration"]) * (time.monotonic() - self.start) / max(done, 1)
        accuracy = " ".join(f"{100 * a:.0f}" for a in metrics["accuracy_per_step"])
        return (
            f"step {metrics['iteration']}/{self.total}  loss {metrics['loss']:.4f}  accuracy % [{accuracy}]  "
            f"predicted acceptance length {metrics['predicted_acceptance_length']:.2f}  lr {metrics['lr']:.2e}  "
            f"grad {metrics['grad_norm']:.2f}  {metrics['tokens_per_second']:.0f} tok/s  "
            f"left {int(left // 60)}:{int(left % 60):02d}"
        )
