"""The library for people who own a megatron-core training loop: convert, save, load, quantise, export.

    model = megatron_spec.convert(gpt_model, [("eagle3", {})], vocab=vocab, base_path=...)
    losses = model(batches)         # one DraftLosses per micro-batch of this rank: sums; .total carries the gradient
    megatron_spec.save(model, "ckpt", iteration=100, optimizer=optimizer)
    megatron_spec.quantize(model, batches)
    megatron_spec.export_draft(model, "out")     # and export_base, validate, decode

megatron-core's process groups must be initialised, as they are in any training script; `megatron_spec.initialize` does
it for a process that has none.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.batch import Batch
from megatron_spec.build import link, load_checkpoint
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import COMPUTES, BaseReference
from megatron_spec.checkpoint.spec import CheckpointSpec, recorded_calls, recorded_objective, resolve
from megatron_spec.commands.convert import check_source, first_draft, own_module, published_draft, requested_config
from megatron_spec.commands.runs import ConvertRun
from megatron_spec.config import (
    LOCAL,
    BaseLayers,
    DecodeConfig,
    DraftConfig,
    Fp8Recipe,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    TransformerImpl,
    UserError,
    expect,
    expect_choice,
    require,
)
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding import engine
from megatron_spec.decoding.options import default_length
from megatron_spec.drafts.contract import Draft, DraftLosses
from megatron_spec.drafts.own import check_modules, objective_of, own_class
from megatron_spec.drafts.randomness import check_seeds, step_of
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.evaluation import validate as validation
from megatron_spec.evaluation.report import Report, require_report
from megatron_spec.export import base as exported_base
from megatron_spec.export import draft as export
from megatron_spec.export.load import inspect_exported_base
from megatron_spec.features.base import FeatureSource
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.generation.prompts import read_prompts
from megatron_spec.planning import layouts
from megatron_spec.planning.draft_modules import check_draft_modules
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.quantization.attach import base_amax_state, check_policy, quantizers
from megatron_spec.quantization.calibrate import LayerReport, calibrate
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import write_json

MAIN_GUARD = (
    "large files are tokenised in processes that import this program once more: put its code into a function that is "
    'called below if __name__ == "__main__":'
)


@dataclass
class SpecModel:
    """A frozen base with its draft on this rank.

    Attributes:
        base: the frozen base, source of `features`.
        draft: the trainable module: give its parameters to your optimizer.
        objective: draft steps, loss and alignment.
        reference: the base on disk, needed to save and export.
        quant: the quantisation policy, if quantised.
        iteration: calls with gradients so far. It decides, with torch's seed, what a draft draws (anchors, dropped
            rows, noise), and `ObjectiveConfig.backbone_iters` counts it; `save` and `load` keep it.
    """

    base: FrozenBase
    draft: Draft
    vocab: DraftVocab
    reference: BaseReference
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    quant: QuantConfig | None = None
    iteration: int = 0
    _seeds_agree: bool = field(default=False, init=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Objectives are completed and checked for the draft, also one that is set later."""
        if name == "draft":
            expect(value, Draft, "draft of a SpecModel", "keep a wrapper beside it: docs/scale.md")
        super().__setattr__(name, objective_of(self.draft, value) if name == "objective" else value)

    @property
    def world(self) -> World:
        """Process groups."""
        return self.base.world

    @property
    def source(self) -> FeatureSource:
        """Features of micro-batches, computed by the base."""
        return OnlineFeatures(self.base)

    def __call__(self, batches: Batch | list[Batch]) -> list[DraftLosses]:
        """Losses of this rank's micro-batches. Sums: divide gradients by the supervised rows of the global batch, after
        they are summed over all ranks that hold this shard of the draft (docs/scale.md#your-own-training-loop).

        Args:
            batches: all micro-batches of this pipeline group, the same list on all its ranks.
        """
        given = _on_device(batches, self.world)
        for batch in given:
            batch.check_positions(self.base.config.max_position_embeddings)
        features, objective = self.source.features(given), self.objective.at(self.iteration)
        if self.draft.draws and not self._seeds_agree:
            check_seeds(self.world)
            self._seeds_agree = True
        with step_of(self.iteration):
            losses = [self.draft(f, self.base, objective) for f in features]
        self.iteration += self.draft.training and torch.is_grad_enabled()
        return losses


def _on_device(batches: Batch | Iterable[Batch], world: World) -> list[Batch]:
    found = list(batches) if isinstance(batches, Iterable) else [batches]
    for batch in found:
        expect(batch, Batch, "micro-batch", "data.loader.BatchLoader makes them")
    return [batch if batch.tokens_BS.device == world.device else batch.to(world.device) for batch in found]


def initialize(parallel: ParallelConfig | None = None, seed: int = 1234) -> World:
    """Initialise torch.distributed and megatron-core's groups, or use the existing ones."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a child that imports the main module
        raise UserError(MAIN_GUARD)
    return distributed.initialize(parallel or distributed.existing_parallel(), seed)


def _world_of(model: Any) -> World:
    """The groups that the model was built with; sequence parallelism is a property of the model, not of the groups."""
    if isinstance(model, FrozenBase):
        return model.world
    chunk = model[0] if isinstance(model, list) and model else model
    sequence_parallel = bool(getattr(getattr(chunk, "config", None), "sequence_parallel", False))
    return initialize(distributed.existing_parallel().replace(sequence_parallel=sequence_parallel))


def convert(
    model: Any, drafts: Sequence[tuple[str, Any]] = (), *, base_path: str | Path | None = None,
    vocab: DraftVocab | None = None, objective: ObjectiveConfig | None = None, seed: int = ConvertRun.seed,
    draft: str | Path | None = None, mtp_from_base: bool = False, draft_transformer_impl: TransformerImpl = "local",
    draft_fp8_recipe: Fp8Recipe | None = None, draft_class: type[Draft] | None = None,
) -> SpecModel:  # fmt: skip
    """Freeze a loaded megatron-core model and add a draft: new, from a folder, or the base's own module.

    Args:
        model: GPTModel, or HybridModel of attention and MLP layers in pairs, or the list of model chunks that Megatron
            passes around (of length one), or a `FrozenBase`. Layers are counted as those of a GPTModel: layer i of a
            HybridModel is its pair 2i, 2i + 1.
        drafts: one pair (kind, configuration). Kind: any algorithm ('eagle3', 'eagle1', 'medusa', 'dflash', ...), or
            'eagle', with the algorithm in the overrides; configuration: that of the kind (`EagleConfig`,
            `MedusaConfig`, `BlockConfig`), a dictionary of overrides, or None.
        base_path: the base on disk; gives the architecture, and saved drafts refer to it. Default: where `load_base`
            read it.
        vocab: calibrated draft vocabulary; default: the whole vocabulary.
        seed: seed of a new draft's initial values.
        draft: folder of a published draft to start from, in any format that tools/check_export.py reads.
        mtp_from_base: start from the base's own prediction module (DeepSeek-V3).
        draft_transformer_impl, draft_fp8_recipe: as the flags of finetune.py: modules of the draft's linears and norms,
            and Transformer Engine's recipe for them in training.
        draft_class: a class of your own for the draft (docs/architecture.md#your-own-draft-or-loss).

    Raises:
        UserError: unsupported models, configurations or layouts.
    """
    check_source(
        draft, mtp_from_base, {"drafts": bool(drafts), "vocab": vocab is not None, "seed": seed != ConvertRun.seed}
    )
    world = _world_of(model)
    reference = getattr(model, "reference", None) if base_path is None else inspect_exported_base(base_path)
    if reference is None:
        raise UserError("convert: found no base_path, expected the folder of the base that this model was loaded from")
    vocab = vocab or DraftVocab.full(reference.config.vocab_size)
    expect(vocab, DraftVocab, "vocab", "DraftVocab.load reads the file of calibrate_draft_vocab.py")
    published = None if draft is None else published_draft(draft, reference)
    config: DraftConfig
    if published is not None:
        config = published.config
    elif mtp_from_base:
        config = own_module(reference)
    else:
        config = requested_config(drafts, reference, vocab)
    base = _frozen(model, reference, world, config)
    paths = _paths(config, world, base.dtype, draft_transformer_impl, draft_fp8_recipe)
    made = first_draft(base, reference, config, vocab, world, base.dtype, seed, published, paths, draft_class)
    return SpecModel(base, made, made.vocab, reference, objective or ObjectiveConfig())  # type: ignore[arg-type]


def _paths(
    config: DraftConfig, world: World, dtype: torch.dtype, impl: TransformerImpl, recipe: Fp8Recipe | None
) -> Paths:
    """The fast paths and modules of a draft. Raises UserError if the modules or the recipe cannot run here."""
    expect_choice(impl, TransformerImpl, "draft_transformer_impl")
    setting = Setting(
        platform.machine(), str(dtype).removeprefix("torch."), world.parallel, draft=config,
        draft_transformer_engine=impl == "transformer_engine", draft_fp8_recipe=recipe,
    )  # fmt: skip
    check_draft_modules(setting)
    return Paths(setting)


def _frozen(model: Any, reference: BaseReference, world: World, config: DraftConfig) -> FrozenBase:
    if isinstance(model, FrozenBase):
        _check_quantised(model, None)
        pairs = {name: (getattr(model.config, name), getattr(reference.config, name)) for name in COMPUTES}
        wrong = [
            f"{name} is {own} in the base and {given} there" for name, (own, given) in pairs.items() if own != given
        ]
        if wrong:
            raise UserError(f"convert: base_path {reference.path} has another base: {'; '.join(wrong)}")
        if not model.capture_layer_ids:
            model.capture(config.capture_layer_ids)
        if config.capture_layer_ids and tuple(model.capture_layer_ids) != tuple(config.capture_layer_ids):
            raise UserError(
                f"convert: the base captures layers {list(model.capture_layer_ids)}, the draft reads "
                f"{list(config.capture_layer_ids)}: load the base with those"
            )
        return model
    return FrozenBase.wrap(model, reference.config, world, config.capture_layer_ids)


def save(model: SpecModel, folder: str | Path, *, iteration: int = 0, optimizer: Any = None, keep: int = 0) -> Path:
    """Save the draft (and optimizer) as a checkpoint for the scripts and `load`. Collective.

    Args:
        optimizer: megatron-core's, as `training.optimizer.build_optimizer` makes it.
    """
    _check_optimizer(optimizer)
    check_modules(model.draft)
    _check_quantised(model.base, model.quant)
    spec = CheckpointSpec(link(model.reference), model.draft.config, model.quant, iteration, own_class(model.draft))
    amax = base_amax_state(model.base) if model.quant is not None and model.quant.base != "none" else None
    return sharded.save(
        folder, spec, model.draft, model.vocab, model.world, optimizer=optimizer, base_amax=amax, keep=keep,
        extra={"iteration": iteration, "calls": model.iteration, "objective": model.objective.to_dict()},
    )  # fmt: skip


def _check_quantised(base: FrozenBase, quant: QuantConfig | None) -> None:
    """Raise UserError if the base is fake-quantised without a policy that `load` would repeat."""
    if quant is None and quantizers(base):
        raise UserError(
            "the base is fake-quantised, by quantize() of another model around it: give each model a base of its own "
            "(load_base)"
        )


def _check_optimizer(optimizer: Any) -> None:
    require(
        optimizer is None or hasattr(optimizer, "sharded_state_dict"),
        f"found a {type(optimizer).__module__}.{type(optimizer).__name__}, expected an optimizer of megatron-core "
        "(training.optimizer.build_optimizer): keep the state of another one yourself",
    )


def load(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, base_path: str | None = None,
    layers: BaseLayers = LOCAL, draft_transformer_impl: TransformerImpl = "local",
    draft_fp8_recipe: Fp8Recipe | None = None, draft_class: type[Draft] | None = None,
) -> SpecModel:  # fmt: skip
    """Base and draft of a checkpoint in the current layout. Collective. Raises UserError for a mismatch.

    Args:
        layers: of the base. draft_transformer_impl, draft_fp8_recipe, draft_class: see `convert`.
    """
    loaded = load_checkpoint(
        folder, initialize(), dtype=dtype, base_path=base_path, layers=layers, draft_impl=draft_transformer_impl,
        draft_fp8_recipe=draft_fp8_recipe, draft_class=draft_class,
    )  # fmt: skip
    known, calls = loaded.extra.get("objective"), recorded_calls(loaded.extra)
    objective = recorded_objective(loaded.spec.draft, known) if known else ObjectiveConfig()
    return SpecModel(loaded.base, loaded.draft, loaded.vocab, loaded.base_ref, objective, loaded.spec.quant, calls)


def load_optimizer(model: SpecModel, folder: str | Path, optimizer: Any) -> int:
    """Load what `save` wrote into a model and an optimizer over `model.draft`; returns its iteration. Collective.

    Tell it to a new scheduler: scheduler.step(increment=iteration). Raises UserError without matching optimizer state.
    """
    _check_optimizer(optimizer)
    extra = sharded.load(resolve(folder), model.draft, model.world, optimizer=optimizer)
    model.iteration = recorded_calls(extra)
    return int(extra["iteration"])


def quantize(
    model: SpecModel, batches: Sequence[Batch | list[Batch]], quant: QuantConfig | None = None
) -> list[LayerReport]:
    """Attach fp8 fake quantisers and calibrate them on micro-batches, through all draft steps. Collective.

    Raises UserError for layouts in which the ranges would be others, or would differ from rank to rank.
    """
    quant = quant or QuantConfig()
    expect(quant, QuantConfig, "quant")
    layouts.check("quantize", model.world.parallel)
    steps = [_on_device(step, model.world) for step in batches]
    check_policy(quant, model.base.config, [n for n, m in model.draft.named_modules() if hasattr(m, "weight")])
    report = calibrate(model.base, model.draft, model.source, steps, model.objective, quant, model.world)
    model.quant = quant
    return report


def export_draft(model: SpecModel, folder: str | Path, **options: Any) -> Path:
    """Export the draft for serving engines, verified; options as in `export.draft.export_draft`. Collective."""
    return export.export_draft(
        model.draft, model.reference, folder, model.quant, model.world, ends=model.base, **options
    )


def export_base(model: SpecModel, folder: str | Path, **options: Any) -> Path:
    """Export the base for serving engines, in fp8 if quantised, verified; options as in `export.base.export_base`.

    Collective.
    """
    return exported_base.export_base(model.base, model.reference, folder, model.quant, model.world, **options)


def _decoding(config: DecodeConfig | None, model: SpecModel) -> DecodeConfig:
    if config is not None:
        expect(config, DecodeConfig, "config")
        require(config.speculative_model is None, "config: the model has its draft: leave speculative_model out")
    layouts.check("decode", model.world.parallel)
    return config or DecodeConfig(max_draft_len=default_length(DecodeConfig(), model.draft.config))


def validate(
    model: SpecModel, prompts: str | Path, config: DecodeConfig | None = None, *, num_prompts: int | None = None,
    draft_lens: Sequence[int] | None = None, tokenizer: str | None = None, output: str | Path | None = None,
) -> Report:  # fmt: skip
    """Decode prompts with the base alone and with the draft, and compare speed and texts. Collective.

    Args:
        prompts: file of prompts, as for validate.py.
        config: decoding options; default: greedy, 3 draft tokens (or all that the draft proposes).
        draft_lens: draft lengths to measure; default: that of `config`.
        tokenizer: folder of the tokenizer; default: the base's.
        output: file for the report.
    """
    config = _decoding(config, model)
    if output is not None:
        together(lambda: require_report(output, "output"))
    folder = tokenizer or str(model.reference.path)
    opened = load_tokenizer(folder)
    was_training = model.draft.training
    model.draft.eval()
    try:
        report = validation.validate(
            model.base, model.draft, read_prompts(str(prompts), num_prompts), opened, config,
            stop_ids=set(stop_token_ids(folder, opened, model.reference.path)), draft_lens=draft_lens,
        )  # fmt: skip
    finally:
        model.draft.train(was_training)
    if output is not None:  # without a journal: what a killed run measured may be of a draft that trained on since
        together(lambda: write_json(output, report.to_dict()) if model.base.world.rank == 0 else None)
    return report


def decode(
    model: SpecModel, prompts: Sequence[Sequence[int]], config: DecodeConfig | None = None, *,
    stop_ids: Sequence[int] = (), speculate: bool = True,
) -> list[engine.Generation]:  # fmt: skip
    """Answers to prompts of token ids, with the draft or (`speculate=False`) with the base alone. Collective.

    Args:
        stop_ids: tokens that end an answer; default: the base's.
    """
    config = _decoding(config, model)
    if any(isinstance(x, (str, int)) or any(isinstance(token, float) for token in x) for x in (*prompts, stop_ids)):
        raise UserError(
            "decode: found text, numbers or a single prompt, expected lists of token ids, one for each prompt"
        )
    was_training = model.draft.training
    model.draft.eval()
    try:
        return engine.decode(
            model.base, prompts, config, stop_ids or model.base.config.eos_token_ids,
            draft=model.draft if speculate else None,
        )  # fmt: skip
    finally:
        model.draft.train(was_training)
