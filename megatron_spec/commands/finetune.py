"""Train the draft of a checkpoint; on a quantised checkpoint the same run is quantisation-aware training."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te_spec
from megatron_spec.base.fast_forward import run_in_fp8
from megatron_spec.base.placement import check_parallel, layers_per_stage
from megatron_spec.build import Loaded, load_checkpoint, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.spec import CheckpointSpec, latest_iteration, read_spec, resolve
from megatron_spec.commands import evaluate
from megatron_spec.commands.data import check_file, check_seq_length, open_dataset, tokenizer_folder
from megatron_spec.commands.features import cached_features, stored_features, template_hash
from megatron_spec.config import (
    BaseConfig,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    TrainConfig,
    UserError,
    presets,
)
from megatron_spec.data.loader import BatchLoader, Dataset
from megatron_spec.data.tokenise import content_hash
from megatron_spec.drafts.fused_unroll import check_fp8
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.features.store import manifest_file, read_manifest
from megatron_spec.planning import layouts
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import require_empty
from megatron_spec.training import tracking
from megatron_spec.training.loop import Position, check_world, train
from megatron_spec.training.optimizer import build_optimizer, wrap_ddp
from megatron_spec.training.step import Trainer

log = logging.getLogger(__name__)


@dataclass
class FinetuneRun:
    """What finetune.py is asked to do."""

    load: str
    save: str
    data: str | None
    train: TrainConfig
    objective: ObjectiveConfig
    parallel: ParallelConfig
    seq_length: int | None = None
    """Tokens a conversation is cut to; default: 2048, or what the stored features were cut to."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template; a line's own win."""
    data_cache_path: str | None = None
    """Folder for tokenised conversations; default: beside the data."""
    base: str | None = None
    tokenizer: str | None = None
    feature_cache: str | None = None
    offline_data: str | None = None
    """A store of features that takes the place of data and base layers."""
    base_fp8: bool = False
    draft_fp8: bool = False
    transformer_impl: str = "local"
    """Layers of the base: 'local' or 'transformer_engine'."""
    teacher: str = "quantised"
    """Of a checkpoint with a fake-quantised base: 'quantised', as it will be served, or 'original'."""
    train_epochs: int | None = None
    """Passes over the data; decides train.train_iters."""
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    evaluation: evaluate.EvalRequest = field(default_factory=evaluate.EvalRequest)
    """Acceptance on held-out prompts while the draft trains."""


def starting_point(run: FinetuneRun) -> tuple[Path, bool]:
    """The folder to start from, and whether that continues an earlier run: --save wins over --load when it has one.

    Raises UserError when --save holds something that is not a run of this draft.
    """
    latest = latest_iteration(run.save)
    if latest is None:
        # A run that was killed before its first save left these; it starts over.
        begun = tracking.FILES | evaluate.FILES
        require_empty(run.save, "it is not a run that could be continued; give another --save folder", begun)
        return resolve(run.load), False
    folder = resolve(run.save)
    found, expected = read_spec(folder), read_spec(resolve(run.load))
    if found.draft != expected.draft or found.base.fingerprint != expected.base.fingerprint:
        raise UserError(f"--save {run.save} holds a run of another draft than --load {run.load}: give another folder")
    if found.quant != expected.quant:
        raise UserError(
            f"--save {run.save} and --load {run.load} are not quantised alike ({_policy(found.quant)} and "
            f"{_policy(expected.quant)}): give another --save folder"
        )
    check_same_run(run, folder)
    return folder, True


def _policy(quant: QuantConfig | None) -> str:
    return "not at all" if quant is None else str(quant.to_dict())


def content_file(run: FinetuneRun) -> Path:
    """The file that says what is trained on. Raises UserError unless there is exactly one source of samples."""
    if (run.data is None) == (run.offline_data is None):
        found = "neither" if run.data is None else "both"
        raise UserError(f"found {found} of --data and --offline-data, expected one: stored features hold their samples")
    if run.data is not None:
        check_file(run.data)
        return Path(run.data)
    assert run.offline_data is not None
    return manifest_file(run.offline_data)


def row_length(run: FinetuneRun) -> int:
    """Longest row in tokens. Raises UserError when stored features were cut to another length than asked for."""
    if run.offline_data is None:
        return run.seq_length or 2048
    stored = read_manifest(run.offline_data).seq_length
    if run.seq_length not in (None, stored):
        raise UserError(
            f"--seq-length {run.seq_length}, but the features in {run.offline_data} were cut to {stored}: leave it out"
        )
    return stored


def data_order(run: FinetuneRun) -> dict[str, Any]:
    """What decides which samples a step sees, by flag: a run that is continued with other values is another run."""
    return {
        "--data": content_hash(content_file(run), run.data_cache_path),
        "--seq-length": row_length(run),
        "--global-batch-size": run.train.global_batch_size,
        "--packing": run.train.packing,
        "--seed": run.train.seed,
        "--chat-template-kwargs": run.chat_template_kwargs or {},
        "--teacher": run.teacher,
    }


def check_same_run(run: FinetuneRun, folder: Path) -> None:
    """Raise UserError when the run that was saved in `folder` went through other samples; warn of another objective."""
    saved = sharded.read_extra(folder)
    for flag, value in data_order(run).items():
        order = saved.get("data_order", {})
        before = order.get(flag, {} if order and flag == "--chat-template-kwargs" else value)
        if before != value:
            what = "holds other content (SHA-256)" if flag == "--data" else "is"
            raise UserError(
                f"{flag} {what} {value}, but the run in --save {run.save} was made with {before}: continue it with the "
                "same, or give another --save folder"
            )
    objective = presets.objective_for(read_spec(folder).draft, run.objective).to_dict()
    before = {**objective, **saved.get("objective", {})}
    changed = [f"{k} {before[k]} -> {v}" for k, v in objective.items() if before[k] != v]
    if changed:
        log.warning("%s continues with another objective: %s", run.save, ", ".join(changed))


def check_before_loading(run: FinetuneRun) -> tuple[Path, bool]:
    """All that can be refused without reading weights."""
    folder, resumed = starting_point(run)
    spec = read_spec(folder)
    content_file(run)
    tracking.check(run.tensorboard_dir, run.wandb_project)
    stored = run.offline_data or run.feature_cache
    row = "base_fp8" if run.base_fp8 else "offline" if run.offline_data else "extract" if stored else "finetune"
    layouts.check(row, run.parallel, spec.base.config.num_experts)
    check_parallel(spec.base.config, run.parallel)
    check_seq_length(row_length(run), spec)
    if run.offline_data is not None:
        check_offline(run)
    if run.transformer_impl == "transformer_engine":
        te_spec.check(spec.base.config, torch.cuda.is_available())
    presets.objective_for(spec.draft, run.objective)
    evaluate.check(run.evaluation, run.parallel, {
        "--base-fp8": run.base_fp8, "--offline-data": run.offline_data is not None,
        "--transformer-impl transformer_engine": run.transformer_impl != "local",
    })  # fmt: skip
    if run.teacher == "original" and (spec.quant is None or spec.quant.base == "none"):
        raise UserError("--teacher original: the base of this checkpoint is not quantised; leave the flag out")
    if run.base_fp8 and run.feature_cache is not None:
        raise UserError("--base-fp8 is for features computed as training goes: leave it out with --feature-cache")
    return folder, resumed


def check_offline(run: FinetuneRun) -> None:
    """Refuse flags that mean nothing where the base does not run and nothing is tokenised."""
    given = {
        "--feature-cache": run.feature_cache, "--tokenizer": run.tokenizer, "--data-cache-path": run.data_cache_path,
        "--chat-template-kwargs": run.chat_template_kwargs,
        "--base-fp8": run.base_fp8,        "--transformer-impl": run.transformer_impl != "local",
    }  # fmt: skip
    wrong = [flag for flag, value in given.items() if value]
    if wrong:
        raise UserError(f"{', '.join(wrong)} with --offline-data: the base does not run there; leave it out")


def open_data(run: FinetuneRun, spec: CheckpointSpec) -> Dataset | None:
    """The tokenised conversations of --data; None with stored features, which hold their samples."""
    if run.offline_data is not None:
        return None
    return open_dataset(
        str(run.data), tokenizer_folder(spec, run.base, run.tokenizer), row_length(run), run.data_cache_path,
        vocab_size=spec.base.config.vocab_size, template_kwargs=run.chat_template_kwargs,
    )  # fmt: skip


def make_loader(run: FinetuneRun, dataset: Dataset, world: World) -> BatchLoader:
    """The dataset in micro-batches for this rank's pipeline group."""
    return BatchLoader(
        dataset,
        micro_batch_size=run.train.micro_batch_size,
        global_batch_size=run.train.global_batch_size,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        seed=run.train.seed,
        pad_multiple=world.sequence_multiple,
        device=world.device,
        context=world.context,
        packing=run.train.packing,
    )


def with_steps(run: FinetuneRun, rows: int) -> FinetuneRun:
    """The run with the steps that its epochs take: the last one may reach into the next epoch."""
    if run.train_epochs is None:
        return run
    steps = -(-rows * run.train_epochs // run.train.global_batch_size)
    log.info("%d epochs of %d rows, %d a step: %d steps", run.train_epochs, rows, run.train.global_batch_size, steps)
    return replace(run, train=replace(run.train, train_iters=steps))


def feature_source(run: FinetuneRun, loaded: Loaded, loader: BatchLoader, world: World) -> FeatureSource:
    """Features computed by the base every time, or once into --feature-cache, or by another run (--offline-data)."""
    if run.offline_data is not None:
        return stored_features(run.offline_data, loaded, world)
    if run.feature_cache is None:
        if run.base_fp8:
            run_in_fp8(loaded.base)
        return OnlineFeatures(loaded.base)
    folder = tokenizer_folder(loaded.spec, run.base, run.tokenizer)
    template = template_hash(folder, run.chat_template_kwargs)
    return cached_features(run.feature_cache, loaded, loader.dataset, template, world, run.train.micro_batch_size)


def describe_layout(world: World, base: BaseConfig) -> str:
    """Sizes of the groups, and the layers of each stage."""
    parallel = world.parallel
    sequence = " with sequence parallelism" if parallel.sequence_parallel else ""
    return (
        f"TP {world.tp_size}{sequence} x CP {world.cp_size} x DP {world.dp_size} x PP {world.pp_size}, layers per "
        f"stage {layers_per_stage(base.num_layers, parallel)}"
    )


def finetune(run: FinetuneRun) -> bool:
    """Train (or continue to train) a draft. Returns False when a signal ended the run early, after saving it.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    folder, resumed = check_before_loading(run)
    world = distributed.initialize(run.parallel, run.train.seed)
    check_world(world, run.train)
    log.info("layout: %s", describe_layout(world, read_spec(folder).base.config))
    dtype = torch.bfloat16 if run.train.bf16 else torch.float32
    original = run.teacher == "original"
    spec = read_spec(folder)
    objective = presets.objective_for(spec.draft, run.objective)
    if run.draft_fp8:
        quantised = spec.quant is not None and spec.quant.draft != "none"
        check_fp8(spec.draft, quantised, world.tp_size, world.device, dtype, objective.detach)
    engine = run.transformer_impl == "transformer_engine"
    dataset = open_data(run, spec)
    loaded = load_checkpoint(
        folder,
        world,
        dtype=dtype,
        base_path=run.base,
        original_base=original,
        transformer_engine=engine,
        ends_only=run.offline_data is not None,
    )
    loaded.draft.fp8 = run.draft_fp8
    if dataset is None:
        dataset = stored_features(str(run.offline_data), loaded, world).store
    loader = make_loader(run, dataset, world)
    run = with_steps(run, loader.samples_per_epoch)
    ddp = wrap_ddp(loaded.draft, world, run.train)
    optimizer, scheduler = build_optimizer(ddp, world, run.train)
    position = Position()
    if resumed:
        extra = sharded.load(folder, loaded.draft, world, optimizer=optimizer)
        position = Position(extra["iteration"], extra["consumed_samples"])
        scheduler.step(increment=position.iteration)
        log.info("continuing %s at iteration %d", run.save, position.iteration)
    trainer = Trainer(world, ddp, optimizer, scheduler, loaded.base, objective)
    config = {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in vars(run).items()}
    tracker = tracking.Tracker(
        Path(run.save), world.rank == 0, resumed_at=position.iteration, tensorboard_dir=run.tensorboard_dir,
        wandb_project=run.wandb_project, config=config,
    )  # fmt: skip
    source = feature_source(run, loaded, loader, world)
    saver, evaluator = CheckpointSaver(run, loaded, trainer, config), None
    if run.evaluation.interval:
        evaluator = evaluate.AcceptanceEvaluator(
            run.evaluation, loaded, run.save, run.tokenizer, position.iteration, run.chat_template_kwargs
        )
    complete = train(trainer, loader, source, run.train, tracker, position, saver, evaluator)
    tracker.close()
    return complete


class CheckpointSaver:
    """Saves the draft with everything a run continues from."""

    def __init__(self, run: FinetuneRun, loaded: Loaded, trainer: Trainer, config: dict[str, object]) -> None:
        self.run, self.loaded, self.trainer, self.config = run, loaded, trainer, config
        self.writer = BackgroundWriter() if run.train.async_save else None
        self.fixed = {"data_order": data_order(run), "objective": trainer.objective.to_dict()}
        self.latest = latest_iteration(run.save)

    def save(self, position: Position) -> None:
        """See `training.loop.Saver`. An iteration that is there already is not written again."""
        if position.iteration == self.latest:
            return
        run, loaded, trainer = self.run, self.loaded, self.trainer
        folder = sharded.save(
            run.save, respec(loaded.spec, iteration=position.iteration), loaded.draft, loaded.vocab, trainer.world,
            optimizer=trainer.optimizer, extra={**self.fixed, **position.state()}, base_amax=loaded.base_amax,
            run_config=self.config, keep=run.train.ckpt_keep, writer=self.writer,
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
