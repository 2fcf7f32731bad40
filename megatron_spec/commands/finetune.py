"""Train the draft of a checkpoint; on a quantised checkpoint the same run is quantisation-aware training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron_spec.base import te
from megatron_spec.base.direct import run_in_fp8
from megatron_spec.base.placement import layers_per_stage
from megatron_spec.build import Loaded, load_checkpoint, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.background import BackgroundWriter
from megatron_spec.checkpoint.spec import latest_iteration
from megatron_spec.commands import evaluate
from megatron_spec.commands.checks import eval_length
from megatron_spec.commands.data import (
    open_dataset,
    tokenizer_folder,
)
from megatron_spec.commands.features import cached_features, stored_features, template_hash
from megatron_spec.commands.finetune_inputs import Resolved, arithmetic, continued, fast_paths, resolve
from megatron_spec.commands.runs import FinetuneRun, settings_of, takes
from megatron_spec.config import BaseConfig, TrainConfig, UserError
from megatron_spec.data.loader import BatchLoader, ConversationDataset, Dataset
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.features.store import FeatureStore
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from megatron_spec.training import tracking
from megatron_spec.training.loop import Position, train
from megatron_spec.training.optimizer import apply_settings, build_optimizer, settings, wrap_ddp
from megatron_spec.training.step import Trainer

log = logging.getLogger(__name__)


def open_data(resolved: Resolved) -> Dataset:
    """The tokenised conversations of --data, or stored features, which hold their samples."""
    run, spec = resolved.run, resolved.spec
    if run.offline_data is not None:
        return FeatureStore(run.offline_data)
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
    train = run.train
    if run.train_epochs is not None:
        steps = -(-rows * run.train_epochs // train.global_batch_size)
        log.info("epochs: %d of %d rows, %d a step: %d steps", run.train_epochs, rows, train.global_batch_size, steps)
        train = train.replace(train_iters=steps)
    return train


def say_schedule(train: TrainConfig) -> None:
    """Log where the learning rate is not what its flags promise."""
    steps, end = train.train_iters, train.lr_decay_iters
    if train.lr_warmup_iters >= steps:
        log.info(
            "--lr-warmup-iters %d: the run ends after %d steps, so it never reaches --lr", train.lr_warmup_iters, steps
        )
    if end is not None and end < steps and train.min_lr == 0 and train.lr_decay_style != "constant":
        log.warning(
            "the learning rate is 0 after step %d (--lr-decay-iters, --min-lr): the other %d steps change nothing", end,
            steps - end,
        )  # fmt: skip


def feature_source(run: FinetuneRun, loaded: Loaded, loader: BatchLoader, world: World) -> FeatureSource:
    """Features computed online, once into --feature-cache, or by another run (--offline-data)."""
    if run.offline_data is not None:
        return stored_features(run.offline_data, loaded, world)
    if run.feature_cache is None:
        if run.base_fp8:
            run_in_fp8(loaded.base)
        return OnlineFeatures(loaded.base)
    dataset = loader.dataset
    assert isinstance(dataset, ConversationDataset), "stored features have no cache"
    template = template_hash(tokenizer_folder(loaded.spec, run.base, run.tokenizer), run.chat_template_kwargs)
    return cached_features(run.feature_cache, loaded, dataset, template, world, run.train.micro_batch_size)


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


def _paths_that_run(loaded: Loaded) -> dict[str, str]:
    """Which fast paths run, or why not. Whether Transformer Engine has attention for a base shows when it is built."""
    found = loaded.draft.paths.to_dict()
    built = getattr(loaded.base, "paths", loaded.draft.paths)  # a base of which the ends alone are loaded has none
    return {**found, "te_attention": built.to_dict()["te_attention"]}


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
    run.train.micro_batches(world.dp_size, world.pp_size)  # or an error
    log.info("layout: %s", describe_layout(world, resolved.spec.base.config))
    loader = make_loader(run, open_data(resolved), world)
    training, position = with_steps(run, loader.samples_per_epoch), resolved.position
    if resolved.resumed:
        training = continued(resolved, training)
    loaded = load_models(resolved, world)
    source = feature_source(run, loaded, loader, world)
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
        wandb_project=run.wandb_project, config={**config, "fast_paths": _paths_that_run(loaded)},
    )  # fmt: skip
    saver, evaluator = CheckpointSaver(resolved, loaded, trainer, training, config), None
    if run.evaluation.interval:
        spec = loaded.spec
        length = eval_length(run.evaluation, spec.base.config, spec.draft, resolved.objective)
        evaluator = evaluate.AcceptanceEvaluator(
            run.evaluation.replace(max_draft_len=length), loaded, run.save, run.tokenizer, position.iteration,
            run.chat_template_kwargs,
        )  # fmt: skip
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
            "optimizer_settings": settings(training), "arithmetic": arithmetic(resolved.run),
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
