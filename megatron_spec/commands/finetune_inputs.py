"""Inputs of finetune.py: what a run starts from or resumes, resolved and checked before any weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.build import resolve_paths
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, latest_iteration, read_spec, recorded_objective
from megatron_spec.checkpoint.spec import resolve as resolve_folder
from megatron_spec.commands import evaluate
from megatron_spec.commands.checks import check_training
from megatron_spec.commands.data import check_file, tokenizer_folder
from megatron_spec.commands.features import template_hash
from megatron_spec.commands.runs import FinetuneRun
from megatron_spec.commands.runs.finetune import DEFAULT_LENGTH
from megatron_spec.config import ObjectiveConfig, QuantConfig, TrainConfig, UserError, presets
from megatron_spec.data.tokenise import content_hash
from megatron_spec.features.store import manifest_file, read_manifest
from megatron_spec.planning.paths import Paths
from megatron_spec.runtime import platform
from megatron_spec.runtime.folders import require_empty, require_writable
from megatron_spec.training import tracking
from megatron_spec.training.kernels import check_kernels
from megatron_spec.training.loop import Position
from megatron_spec.training.optimizer import KIND, settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """The resolved inputs of a run, determined once, before any weight is read."""

    run: FinetuneRun
    folder: Path
    """Iteration folder to start from."""
    resumed: bool
    """The folder belongs to this run, which resumes."""
    spec: CheckpointSpec
    """spec.json of that folder."""
    objective: ObjectiveConfig
    """The objective for this draft."""
    seq_length: int
    """Longest row in tokens."""
    order: dict[str, Any]
    """Settings that determine the samples of a step, by flag."""
    start: dict[str, str]
    """Path and identity of the checkpoint that the first step started from."""
    saved: dict[str, Any]
    """Saved beside the tensors by an earlier start of this run."""

    @property
    def position(self) -> Position:
        """Where the first step begins. Iterations continue those of a folder that the run is saved into."""
        begun_at = self.saved.get("begun_at", 0) if self.resumed else self._iteration_of_start
        iteration = self.saved["iteration"] if self.resumed else begun_at
        return Position(iteration, self.saved["consumed_samples"] if self.resumed else 0, begun_at)

    @property
    def _iteration_of_start(self) -> int:
        return self.spec.iteration if self.folder.parent == Path(self.run.save) else 0

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.run.train.bf16 else torch.float32


def fast_paths(resolved: Resolved) -> Paths:
    """The fast paths of the run. Raises UserError when one that was asked for cannot run."""
    run = resolved.run
    return resolve_paths(
        resolved.spec, run.parallel, resolved.dtype, original_base=run.teacher == "original",
        layers=run.layers, ends_only=run.offline_data is not None,
        objective=resolved.objective, rows=run.train.micro_batch_size * resolved.seq_length, plain=run.plain,
        draft_impl=run.draft_transformer_impl, draft_fp8_recipe=run.draft_fp8_recipe,
        optimizer_impl=run.train.optimizer_impl,
        wanted=tuple(name for name in ("base_fp8", "draft_fp8") if getattr(run, name)),
    )  # fmt: skip


def resolve(run: FinetuneRun) -> Resolved:
    """Resolve the inputs of a run: the folder to start from, the draft and its objective, the order of the data.

    Raises UserError for everything that can be checked without reading weights.
    """
    folder, resumed = starting_point(run)
    spec, length = read_spec(folder), row_length(run)
    saved = sharded.read_extra(folder) if resumed else {}
    objective = presets.objective_for(spec.draft, _with_saved_weights(run, spec, saved) if resumed else run.objective)
    start = saved.get("start") or identity(resolve_folder(run.load))
    resolved = Resolved(run, folder, resumed, spec, objective, length, data_order(run, spec, length), start, saved)
    if resumed:
        check_same_run(resolved)
        if run.train_epochs is None:  # else when the data are counted
            changed_settings(resolved, run.train)
    check(resolved)
    return resolved


def _with_saved_weights(run: FinetuneRun, spec: CheckpointSpec, saved: dict[str, Any]) -> ObjectiveConfig:
    """The objective of a run that is continued: without a flag, steps weigh as they did."""
    given = run.objective
    if given.step_weights is not None or given.step_decay is not None:
        return given
    before = recorded_objective(spec.draft, saved.get("objective", {}))
    return given.replace(step_weights=before.step_weights, step_decay=before.step_decay)


def starting_point(run: FinetuneRun) -> tuple[Path, bool]:
    """(folder to start from, whether that resumes an earlier run): a run in --save takes precedence over --load.

    Raises UserError if --save has something other than a run of this draft.
    """
    latest = latest_iteration(run.save)
    if latest is None:
        # A run that was killed before its first save left these; it starts over.
        begun = tracking.FILES | evaluate.FILES
        require_empty(run.save, "it is not a run that could be continued; give another --save folder", begun)
        return resolve_folder(run.load), False
    folder = resolve_folder(run.save)
    if not sharded.has_optimizer(folder):
        if resolve_folder(run.load).resolve() != folder.resolve():
            raise UserError(
                f"--save {run.save} holds a checkpoint without optimizer state, as convert_model.py and quantize.py "
                f"write it: train it with --load {run.save}, or give another --save folder"
            )
        return folder, False
    found, expected = read_spec(folder), read_spec(resolve_folder(run.load))
    if found.draft != expected.draft or found.base.fingerprint != expected.base.fingerprint:
        raise UserError(f"--save {run.save} holds a run of another draft than --load {run.load}: give another folder")
    if found.quant != expected.quant:
        raise UserError(
            f"--save {run.save} and --load {run.load} are quantised differently ({_policy(found.quant)} and "
            f"{_policy(expected.quant)}): give another --save folder"
        )
    return folder, True


def _policy(quant: QuantConfig | None) -> str:
    return "not at all" if quant is None else str(quant.to_dict())


def content_file(run: FinetuneRun) -> Path:
    """The file that identifies the training data. Raises UserError without a source of samples."""
    if run.data is None and run.offline_data is None:
        raise UserError("give one of --data and --offline-data (which contains its samples): found neither")
    if run.data is not None:
        check_file(run.data)
        return Path(run.data)
    assert run.offline_data is not None
    return manifest_file(run.offline_data)


def row_length(run: FinetuneRun) -> int:
    """Longest row in tokens. Raises UserError if stored features were truncated to another length than --seq-length."""
    content_file(run)
    if run.offline_data is None:
        return run.seq_length or DEFAULT_LENGTH
    stored = read_manifest(run.offline_data).seq_length
    if run.seq_length not in (None, stored):
        raise UserError(
            f"--seq-length {run.seq_length}, but the features in {run.offline_data} were cut to {stored}: leave it out"
        )
    return stored


def data_order(run: FinetuneRun, spec: CheckpointSpec, seq_length: int) -> dict[str, Any]:
    """Settings that determine the samples of a step, by flag; a run cannot resume with other values."""
    found = {
        "--data": content_hash(content_file(run), run.data_cache_path),
        "--seq-length": seq_length,
        "--global-batch-size": run.train.global_batch_size,
        "--packing": run.train.packing,
        "--seed": run.train.seed,
        "--chat-template-kwargs": run.chat_template_kwargs or {},
        "--teacher": run.teacher,
    }
    if run.data is not None:  # stored features hold their tokens
        found["--tokenizer"] = template_hash(tokenizer_folder(spec, run.base, run.tokenizer))
    return found


def arithmetic(run: FinetuneRun) -> dict[str, Any]:
    """What rounds in base and draft, by flag."""
    layers = {f"--{name.replace('_', '-')}": value for name, value in run.layers.to_dict().items()}
    return {
        **layers, "--base-fp8": run.base_fp8, "--draft-fp8": run.draft_fp8, "--draft-fp8-recipe": run.draft_fp8_recipe,
        "--plain": run.plain, "--draft-transformer-impl": run.draft_transformer_impl,
    }  # fmt: skip


def check_same_run(resolved: Resolved) -> None:
    """Raise UserError if the saved run has other samples; warn about another objective or arithmetic."""
    run, saved = resolved.run, sharded.read_extra(resolved.folder)
    if "data_order" not in saved:
        raise UserError(
            f"--save {run.save} holds a checkpoint of another training loop (megatron_spec.save), which does not say "
            f"what data it has read: start a run from it with --load {run.save} and another --save folder"
        )
    for flag, value in resolved.order.items():
        before = saved["data_order"].get(flag, {} if flag == "--chat-template-kwargs" else value)
        if before != value:
            what = "has other content (SHA-256)" if flag in ("--data", "--tokenizer") else "is"
            flag = "--offline-data" if flag == "--data" and run.offline_data is not None else flag
            raise UserError(
                f"{flag} {what} {value}, but the run in --save {run.save} began with {before}: give the same to "
                "continue it, or another --save folder to start a new run"
            )
    load = resolve_folder(run.load)
    if load.resolve() != resolved.folder.resolve() and identity(load)["run.json"] != resolved.start["run.json"]:
        raise UserError(
            f"--load {run.load} is another checkpoint than {resolved.start['path']}, which the run in --save "
            f"{run.save} started from: give that one, or another --save folder"
        )
    objective = resolved.objective.to_dict()
    known = objective | {"step_weights": "decay"} | saved.get("objective", {})
    before = recorded_objective(resolved.spec.draft, known).to_dict()
    changed = [f"{k} {before[k]} -> {v}" for k, v in objective.items() if before[k] != v]
    if changed:
        log.warning("%s continues with another objective: %s", run.save, ", ".join(changed))
    now = arithmetic(run)
    other = [f"{flag} {old} -> {now[flag]}" for flag, old in saved.get("arithmetic", now).items() if now[flag] != old]
    if other:
        log.warning("%s continues with different arithmetic: %s", run.save, ", ".join(other))


def continued(resolved: Resolved, train: TrainConfig) -> TrainConfig:
    """The training loop of a resumed run, with the effective optimizer settings. Raises UserError."""
    changed = changed_settings(resolved, train)
    if not changed:
        return train
    counts = "checkpoint" if resolved.run.use_checkpoint_opt_param_scheduler else "flags"
    log.warning("optimizer settings are those of the %s, which differ in %s", counts, ", ".join(changed))
    return train.replace(**changed) if counts == "checkpoint" else train


def changed_settings(resolved: Resolved, train: TrainConfig) -> dict[str, Any]:
    """Optimizer settings of the checkpoint that differ from `train`, if the flags allow a difference.

    Raises UserError for different settings without --override-opt-param-scheduler or
    --use-checkpoint-opt-param-scheduler, which select the effective ones, and for another kind of optimizer or
    precision.
    """
    run, wanted = resolved.run, settings(train)
    before = {**wanted, **resolved.saved.get("optimizer_settings", {})}
    changed = {name: before[name] for name in wanted if before[name] != wanted[name]}
    if train.lr_decay_style == "constant" == before["lr_decay_style"]:
        changed.pop("lr_decay_iters", None)
    lines = [f"--{n.replace('_', '-')} is {wanted[n]}, the checkpoint has {before[n]}" for n in changed]
    kind = [line for name, line in zip(changed, lines, strict=True) if name in KIND]
    if kind:
        raise UserError(
            f"--save {run.save}: {'; '.join(kind)}. Its optimizer state has another form: continue with the same, or "
            f"start a new run with --load {run.save} and another --save folder"
        )
    if not changed or run.use_checkpoint_opt_param_scheduler or run.override_opt_param_scheduler:
        return changed
    raise UserError(
        f"--save {run.save} continues with other optimizer settings: {'; '.join(lines)}. Give the same, or "
        "--override-opt-param-scheduler (use the flags) or --use-checkpoint-opt-param-scheduler (use the checkpoint)"
    )


def check(resolved: Resolved) -> None:
    """Raise UserError for flags that conflict with the checkpoint, the layout, other flags or this machine."""
    run, spec = resolved.run, resolved.spec
    check_training(run, spec.base.config, spec.draft, spec.quant, resolved.objective, resolved.seq_length)
    tracking.check(run.tensorboard_dir, run.wandb_project)
    if run.feature_cache is not None:
        require_writable(run.feature_cache)
    if run.evaluation.interval:
        check_file(str(run.evaluation.data), "--eval-data")
    te.check(run.layers, platform.machine())
    check_kernels(run.train.optimizer_impl)
    fast_paths(resolved)
