"""Train the draft of a checkpoint; on a quantised checkpoint the same run is quantisation-aware training."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.base.direct import run_in_fp8
from megatron_spec.base.placement import check_parallel, layers_per_stage
from megatron_spec.build import Loaded, load_checkpoint, resolve_paths, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, latest_iteration, read_spec
from megatron_spec.checkpoint.spec import resolve as resolve_folder
from megatron_spec.commands import evaluate
from megatron_spec.commands.data import (
    check_base_shapes,
    check_file,
    check_seq_length,
    open_dataset,
    tokenizer_folder,
)
from megatron_spec.commands.features import cached_features, stored_features, template_hash
from megatron_spec.commands.runs import FinetuneRun, settings_of, takes
from megatron_spec.config import BaseConfig, ObjectiveConfig, QuantConfig, TrainConfig, UserError, presets
from megatron_spec.data.loader import BatchLoader, Dataset
from megatron_spec.data.tokenise import content_hash
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.features.store import manifest_file, read_manifest
from megatron_spec.planning import layouts
from megatron_spec.planning.paths import Paths
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import require_empty
from megatron_spec.training import tracking
from megatron_spec.training.kernels import check_kernels
from megatron_spec.training.loop import Position, check_world, train
from megatron_spec.training.optimizer import KIND, apply_settings, build_optimizer, settings, wrap_ddp
from megatron_spec.training.step import Trainer

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
    def layout_row(self) -> str:
        """Row of `layouts.ROWS`."""
        if self.run.base_fp8:
            return "base_fp8"
        if self.run.offline_data is not None:
            return "offline"
        return "finetune" if self.run.feature_cache is None else "extract"

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
    objective = presets.objective_for(spec.draft, run.objective)
    start = saved.get("start") or identity(resolve_folder(run.load))
    resolved = Resolved(run, folder, resumed, spec, objective, length, data_order(run, length), start, saved)
    if resumed:
        check_same_run(resolved)
        if run.train_epochs is None:  # else when the data are counted
            changed_settings(resolved, run.train)
    check(resolved)
    return resolved


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
            f"--save {run.save} and --load {run.load} are not quantised alike ({_policy(found.quant)} and "
            f"{_policy(expected.quant)}): give another --save folder"
        )
    return folder, True


def _policy(quant: QuantConfig | None) -> str:
    return "not at all" if quant is None else str(quant.to_dict())


def content_file(run: FinetuneRun) -> Path:
    """The file that identifies the training data. Raises UserError unless there is exactly one source of samples."""
    if (run.data is None) == (run.offline_data is None):
        found = "neither" if run.data is None else "both"
        raise UserError(f"found {found} of --data and --offline-data, expected one: stored features hold their samples")
    if run.data is not None:
        check_file(run.data)
        return Path(run.data)
    assert run.offline_data is not None
    return manifest_file(run.offline_data)


def row_length(run: FinetuneRun) -> int:
    """Longest row in tokens. Raises UserError if stored features were truncated to another length than --seq-length."""
    content_file(run)
    if run.offline_data is None:
        return run.seq_length or 2048
    stored = read_manifest(run.offline_data).seq_length
    if run.seq_length not in (None, stored):
        raise UserError(
            f"--seq-length {run.seq_length}, but the features in {run.offline_data} were cut to {stored}: leave it out"
        )
    return stored


def data_order(run: FinetuneRun, seq_length: int) -> dict[str, Any]:
    """Settings that determine the samples of a step, by flag; a run cannot resume with other values."""
    return {
        "--data": content_hash(content_file(run), run.data_cache_path),
        "--seq-length": seq_length,
        "--global-batch-size": run.train.global_batch_size,
        "--packing": run.train.packing,
        "--seed": run.train.seed,
        "--chat-template-kwargs": run.chat_template_kwargs or {},
        "--teacher": run.teacher,
    }


def check_same_run(resolved: Resolved) -> None:
    """Raise UserError if the saved run has other samples; warn about another objective."""
    run, saved = resolved.run, sharded.read_extra(resolved.folder)
    for flag, value in resolved.order.items():
        before = saved.get("data_order", {}).get(flag, {} if flag == "--chat-template-kwargs" else value)
        if before != value:
            what = "holds other content (SHA-256)" if flag == "--data" else "is"
            raise UserError(
                f"{flag} {what} {value}, but the run in --save {run.save} was made with {before}: continue it with the "
                "same, or give another --save folder"
            )
    load = resolve_folder(run.load)
    own = load.resolve().parent == Path(run.save).resolve()
    if not own and identity(load)["run.json"] != resolved.start["run.json"]:
        raise UserError(
            f"--load {run.load} is another checkpoint than {resolved.start['path']}, which the run in --save "
            f"{run.save} started from: give that one, or another --save folder"
        )
    objective = resolved.objective.to_dict()
    before = {**objective, **saved.get("objective", {})}
    changed = [f"{k} {before[k]} -> {v}" for k, v in objective.items() if before[k] != v]
    if changed:
        log.warning("%s continues with another objective: %s", run.save, ", ".join(changed))


def continued(resolved: Resolved, train: TrainConfig) -> TrainConfig:
    """The training loop of a resumed run, with the effective optimizer settings. Raises UserError."""
    changed = changed_settings(resolved, train)
    if not changed:
        return train
    counts = "checkpoint" if resolved.run.use_checkpoint_opt_param_scheduler else "flags"
    log.warning("optimizer settings of the %s count, which differ in %s", counts, ", ".join(changed))
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
    said = [f"--{n.replace('_', '-')} is {wanted[n]}, the checkpoint has {before[n]}" for n in changed]
    kind = [line for name, line in zip(changed, said, strict=True) if name in KIND]
    if kind:
        raise UserError(
            f"--save {run.save}: {'; '.join(kind)}. Its optimizer state has another form: continue with the same, or "
            f"start a new run with --load {run.save} and another --save folder"
        )
    if not changed or run.use_checkpoint_opt_param_scheduler or run.override_opt_param_scheduler:
        return changed
    raise UserError(
        f"--save {run.save} continues with other optimizer settings: {'; '.join(said)}. Give the same, or "
        "--override-opt-param-scheduler (the flags count) or --use-checkpoint-opt-param-scheduler (the checkpoint "
        "counts)"
    )


def check(resolved: Resolved) -> None:
    """Raise UserError for flags that conflict with the checkpoint, the layout, other flags or this machine."""
    run, base = resolved.run, resolved.spec.base.config
    check_base_shapes(run, base)
    tracking.check(run.tensorboard_dir, run.wandb_project)
    layouts.check(resolved.layout_row, run.parallel, base.num_experts)
    check_parallel(base, run.parallel)
    check_seq_length(resolved.seq_length, resolved.spec)
    run.check_features()
    te.check(run.layers, platform.machine())
    evaluate.check(run.evaluation, run.parallel)
    check_kernels(run.train.optimizer_impl)
    fast_paths(resolved)
    quant = resolved.spec.quant
    if run.teacher == "original" and (quant is None or quant.base == "none"):
        raise UserError("--teacher original: the base of this checkpoint is not quantised; leave the flag out")


def open_data(resolved: Resolved) -> Dataset | None:
    """The tokenised conversations of --data; None with stored features, which hold their samples."""
    run, spec = resolved.run, resolved.spec
    if run.offline_data is not None:
        return None
    dataset = open_dataset(
        str(run.data), tokenizer_folder(spec, run.base, run.tokenizer), resolved.seq_length, run.data_cache_path,
        vocab_size=spec.base.config.vocab_size, template_kwargs=run.chat_template_kwargs,
    )  # fmt: skip
    if run.objective.replay_weight != 1 and not dataset.store.meta["rejected"]:
        raise UserError(
            f"--replay-weight {run.objective.replay_weight}: no line of {run.data} has rejections; write them with "
            "generate.py --save-rejections, or leave it out"
        )
    return dataset


def make_loader(run: FinetuneRun, dataset: Dataset, world: World) -> BatchLoader:
    """The dataset in micro-batches for this rank's pipeline group."""
    return BatchLoader(
        dataset,
        micro_batch_size=run.train.micro_batch_size,
        global_batch_size=run.train.global_batch_size,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        seed=run.train.seed,
        pad_multiple=world.sequence_multiple * (te.FP8_ROWS if run.layers.recipe else 1),
        device=world.device,
        context=world.context,
        packing=run.train.packing,
    )


def with_steps(run: FinetuneRun, rows: int) -> TrainConfig:
    """The training loop with the steps of its epochs; the last step may extend into the next epoch."""
    if run.train_epochs is None:
        return run.train
    steps = -(-rows * run.train_epochs // run.train.global_batch_size)
    log.info("%d epochs of %d rows, %d a step: %d steps", run.train_epochs, rows, run.train.global_batch_size, steps)
    return run.train.replace(train_iters=steps)


def feature_source(run: FinetuneRun, loaded: Loaded, loader: BatchLoader, world: World) -> FeatureSource:
    """Features computed online, once into --feature-cache, or by another run (--offline-data)."""
    if run.offline_data is not None:
        return stored_features(run.offline_data, loaded, world)
    if run.feature_cache is None:
        if run.base_fp8:
            run_in_fp8(loaded.base)
        return OnlineFeatures(loaded.base)
    template = template_hash(tokenizer_folder(loaded.spec, run.base, run.tokenizer), run.chat_template_kwargs)
    return cached_features(run.feature_cache, loaded, loader.dataset, template, world, run.train.micro_batch_size)


def describe_layout(world: World, base: BaseConfig) -> str:
    """Sizes of the groups, and the layers of each stage."""
    parallel = world.parallel
    sequence = " with sequence parallelism" if parallel.sequence_parallel else ""
    return (
        f"TP {world.tp_size}{sequence} x CP {world.cp_size} x DP {world.dp_size} x PP {world.pp_size}, layers per "
        f"stage {layers_per_stage(base.num_layers, parallel)}"
    )


def load_models(resolved: Resolved, world: World) -> Loaded:
    """Load base and draft for the run."""
    run, paths = resolved.run, fast_paths(resolved)
    for line in paths.lines():
        log.info("fast path %s", line)
    return load_checkpoint(
        resolved.folder,
        world,
        dtype=resolved.dtype,
        base_path=run.base,
        original_base=run.teacher == "original",
        layers=run.layers,
        ends_only=run.offline_data is not None,
        paths=paths,
        spec=resolved.spec,
    )


@takes(FinetuneRun)
def finetune(run: FinetuneRun) -> bool:
    """Train a draft, or resume training. Returns False if a signal ended the run early, after saving.

    Raises UserError for invalid input, if possible before any weight is read.
    """
    before, resolved = latest_iteration(run.save), resolve(run)
    agreed = settings_of(run, data=resolved.order["--data"], load=resolved.start, save=resolved.position)
    world = distributed.initialize(run.parallel, run.train.seed, settings=agreed)
    with distributed.sole_run(run.save, world):
        if latest_iteration(run.save) != before:
            raise UserError(f"--save {run.save}: another run saved there meanwhile: start again to continue it")
        return _finetune(run, resolved, world)


def _finetune(run: FinetuneRun, resolved: Resolved, world: World) -> bool:
    check_world(world, run.train)
    log.info("layout: %s", describe_layout(world, resolved.spec.base.config))
    dataset = open_data(resolved)
    loaded = load_models(resolved, world)
    if dataset is None:
        dataset = stored_features(str(run.offline_data), loaded, world).store
    loader = make_loader(run, dataset, world)
    training, position = with_steps(run, loader.samples_per_epoch), resolved.position
    if resolved.resumed:
        training = continued(resolved, training)
    ddp = wrap_ddp(loaded.draft, world, training)
    optimizer, scheduler = build_optimizer(ddp, world, training)
    if resolved.resumed:
        sharded.load(resolved.folder, loaded.draft, world, optimizer=optimizer)
        apply_settings(optimizer, training)
        scheduler.step(increment=position.done)
        log.info("continuing %s at iteration %d", run.save, position.iteration)
    trainer = Trainer(world, ddp, optimizer, scheduler, loaded.base, resolved.objective)
    config = run.replace(train=training, train_epochs=None).to_dict()
    tracker = tracking.Tracker(
        Path(run.save), world.rank == 0, resumed_at=position.iteration, tensorboard_dir=run.tensorboard_dir,
        wandb_project=run.wandb_project, config={**config, "fast_paths": loaded.draft.paths.to_dict()},
    )  # fmt: skip
    source = feature_source(run, loaded, loader, world)
    saver, evaluator = CheckpointSaver(resolved, loaded, trainer, training, config), None
    if run.evaluation.interval:
        evaluator = evaluate.AcceptanceEvaluator(
            run.evaluation, loaded, run.save, run.tokenizer, position.iteration, run.chat_template_kwargs
        )
    complete = train(trainer, loader, source, training, tracker, position, saver, evaluator)
    tracker.close()
    return complete


class CheckpointSaver:
    """Saves the draft with everything needed to resume."""

    def __init__(
        self, resolved: Resolved, loaded: Loaded, trainer: Trainer, training: TrainConfig, config: dict[str, Any]
    ) -> None:
        self.run, self.loaded, self.trainer, self.config = resolved.run, loaded, trainer, config
        self.writer = BackgroundWriter() if self.run.train.async_save else None
        self.fixed = {
            "data_order": resolved.order, "objective": resolved.objective.to_dict(), "start": resolved.start,
            "optimizer_settings": settings(training),
        }  # fmt: skip
        self.latest = latest_iteration(self.run.save)

    def save(self, position: Position) -> None:
        """See `training.loop.Saver`. An existing iteration is not written again."""
        if position.iteration == self.latest:
            return
        run, loaded, trainer = self.run, self.loaded, self.trainer
        folder = sharded.save(
            run.save, respec(loaded.spec, iteration=position.iteration), loaded.draft, loaded.vocab, trainer.world,
            optimizer=trainer.optimizer, extra={**self.fixed, **position.state()}, base_amax=loaded.base_amax,
            run_config=self.config, keep=run.train.ckpt_keep, keep_until=position.begun_at, writer=self.writer,
        )  # fmt: skip
        self.latest = position.iteration
        log.info("%s %s", "saved" if self.writer is None else "saving in the background", folder)

    def poll(self) -> None:
        """See `training.loop.Saver`."""
        if self.writer is not None:
            self.writer.poll()

    def wait(self) -> None:
        """See `training.loop.Saver`."""
        if self.writer is not None:
            self.writer.wait()
