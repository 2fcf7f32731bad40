"""validate.py and generate.py: decoding with the base verifying, from a checkpoint, an exported folder or a base."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.base.model import FrozenBase
from megatron_spec.base.placement import check_parallel
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import BaseReference
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, locked, read_spec
from megatron_spec.commands.convert import check_draft_parallel
from megatron_spec.commands.data import check_base_shapes, check_file
from megatron_spec.commands.features import teacher_fingerprint, template_hash
from megatron_spec.commands.runs import GenerateRun, ValidateRun, settings_of, takes
from megatron_spec.config import (
    LOCAL,
    BaseConfig,
    BaseLayers,
    DecodeConfig,
    DecodingType,
    DraftConfig,
    ParallelConfig,
    TransformerImpl,
    UserError,
)
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.drafters.draft_target import check_tokenizers
from megatron_spec.decoding.drafters.user import find_drafter
from megatron_spec.decoding.options import (
    DECODING_TYPES,
    WITHOUT_DRAFT,
    check_lengths,
    check_options,
    check_undrafted,
    decoding_type,
)
from megatron_spec.drafts.contract import Draft
from megatron_spec.evaluation import html
from megatron_spec.evaluation.report import Report, Run
from megatron_spec.evaluation.validate import validate as run_validation
from megatron_spec.export.formats import Reading
from megatron_spec.export.load import inspect_exported_base, load_draft, load_exported_base, open_draft
from megatron_spec.generation.prompts import Dialogue, Prompt, read_prompts
from megatron_spec.generation.questions import check_questions, write_questions
from megatron_spec.generation.synthesize import answer_settings, check_output, synthesize_to_file
from megatron_spec.planning import draft_modules, layouts
from megatron_spec.planning.paths import OF_DECODING, Paths, Setting
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.hub import model_folder

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """Resolved inputs of a decoding run; no weights are read yet.

    Attributes:
        kind: decoding type; None: the base alone.
        folder: iteration folder of a draft checkpoint, or None.
        spec: its spec.json.
        base: folder given for the base, or None.
        base_config: architecture of the base.
        reference: the base, unless the checkpoint names it.
        captures: base layers that the draft captures.
        tokenizer, source: the tokenizer, and its folder.
        decode: the complete configuration.
        reading: the draft of an exported folder.
        target: a second base, used as draft.
    """

    kind: DecodingType | None
    folder: Path | None
    spec: CheckpointSpec | None
    base: str | None
    base_config: BaseConfig
    reference: BaseReference | None
    captures: Sequence[int]
    tokenizer: Any
    source: str
    decode: DecodeConfig
    reading: Reading | None = None
    target: BaseReference | None = None

    @property
    def agreed(self) -> dict[str, Any]:
        """Findings, besides the settings, that must be equal on all ranks."""
        return {} if self.folder is None else {"load": identity(self.folder)}

    def check_prompts(self, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None) -> None:
        """Raise UserError for a prompt that the template refuses, or with token ids outside the base's vocabulary.

        Checks the first prompt, or all prompts if the tokenizer is larger than the base's vocabulary.
        """
        known = self.base_config.vocab_size
        encoder = ChatEncoder(self.tokenizer, template_kwargs=template_kwargs, vocab_size=known)
        for prompt in prompts if max(self.tokenizer.get_vocab().values()) >= known else prompts[:1]:
            Dialogue(prompt).ask(encoder, sys.maxsize)


def _thinking_tokens(decode: DecodeConfig, tokenizer: Any, vocab_size: int) -> DecodeConfig:
    """Thinking tokens, by default the tokenizer's. Raises UserError for one outside the base's vocabulary."""
    if not decode.use_relaxed_acceptance_for_thinking:
        return decode
    vocab, changes = tokenizer.get_vocab(), {}
    for name, word in (("begin_thinking_phase_token", "<think>"), ("end_thinking_phase_token", "</think>")):
        if getattr(decode, name) is None:
            changes[name] = vocab.get(word)
        token = changes.get(name, getattr(decode, name))
        if token is not None and not 0 <= token < vocab_size:
            raise UserError(
                f"--{name.replace('_', '-')} {token}: the base has the tokens 0 to {vocab_size - 1}; give the id that "
                "its tokenizer has for the beginning or the end of a thinking phase"
            )
    return decode.replace(**changes)


@contextmanager
def _iteration(load: str | None) -> Iterator[Path | None]:
    """The iteration folder of `load`, locked while it is read; None without `load`."""
    if load is None:
        yield None
    else:
        with locked(load) as folder:
            yield folder


def _draft_of(
    spec: CheckpointSpec | None, base: str | None, decode: DecodeConfig
) -> tuple[DraftConfig | None, Reading | None, BaseReference | None]:
    """(configuration of the draft, the draft itself if it is exported, the base unless a checkpoint names it)."""
    exported = decode.speculative_model if decode.decoding_type not in WITHOUT_DRAFT else None
    if spec is not None:
        if exported is not None:
            raise UserError("--load and --speculative-model are two drafts: give one of them")
        return spec.draft, None, None
    if base is None:
        raise UserError(
            "give --load (a draft checkpoint), or --base with --speculative-model (an exported draft) or with "
            "--decoding-type NGram, DraftTarget or User"
        )
    reference = inspect_exported_base(base)
    if exported is None:
        return None, None, reference
    reading = open_draft(exported, reference)
    return reading.config, reading, reference


def plan(
    folder: Path | None, base: str | None, decode: DecodeConfig, parallel: ParallelConfig, tokenizer: str | None,
    draft_needed: bool, lens: Sequence[int] | None = None,
) -> Plan:  # fmt: skip
    """Resolve the inputs of a decoding run. Raises UserError for mismatches; no weights are read.

    Args:
        folder: iteration folder of a draft checkpoint.
        lens: draft lengths; default: that of `decode`.
        draft_needed: a missing draft is an error; else the base decodes alone.
    """
    spec = None if folder is None else read_spec(folder)
    config, reading, reference = _draft_of(spec, base, decode)
    algorithm = config.algorithm if config is not None else None
    kind = None
    if draft_needed or algorithm is not None or decode.decoding_type is not None:
        kind = decoding_type(algorithm, decode.decoding_type)
    known: Any = reference or (spec and spec.base)
    base_config: BaseConfig = known.config
    layouts.check("decode", parallel)
    check_parallel(base_config, parallel)
    if config is not None:
        check_draft_parallel(config, parallel)
    source = tokenizer or base or str(known.path)
    opened = load_tokenizer(source)
    decode = _thinking_tokens(decode, opened, base_config.vocab_size).replace(decoding_type=kind)
    if kind is None:
        check_undrafted(decode)
    else:
        check_options(decode, kind)
        draft = config if kind in DECODING_TYPES.values() else None
        trained = _trained_steps(folder) if folder is not None and algorithm == "p-eagle" else None
        check_lengths(decode, lens or (decode.max_draft_len,), draft, trained)
    if kind == "User":
        find_drafter(decode.drafter or "")
    target = None
    if kind == "DraftTarget":
        assert decode.speculative_model is not None
        target = inspect_exported_base(decode.speculative_model)
        check_parallel(target.config, parallel)
        check_tokenizers(opened, load_tokenizer(decode.speculative_model), decode.speculative_model)
    reads = ("Eagle3", "Eagle", "MTP", "DFlash", "DSpark")
    captures = config.capture_layer_ids if config is not None and kind in reads else ()
    return Plan(kind, folder, spec, base, base_config, reference, captures, opened, source, decode, reading, target)


def _trained_steps(folder: Path) -> int | None:
    """--ttt-steps of the run that saved a checkpoint; None for one that no training saved."""
    found: int | None = sharded.read_extra(folder).get("objective", {}).get("ttt_steps")
    return found


@dataclass
class Models:
    """Base and draft on this rank.

    Attributes:
        draft: draft model, second base model, or None.
        fingerprint: identity of the base.
        fake_quantised: the inputs of the base's linears are rounded to fp8.
    """

    base: FrozenBase
    draft: Any
    fingerprint: str
    fake_quantised: bool


def check_draft_modules_of(planned: Plan, parallel: ParallelConfig, dtype: torch.dtype, impl: TransformerImpl) -> None:
    """Raise UserError for modules of a draft that cannot be built here, or without a draft that has modules."""
    if impl == "local":
        return
    config = planned.reading.config if planned.reading is not None else None
    if planned.folder is not None and planned.spec is not None and planned.kind not in WITHOUT_DRAFT:
        config = planned.spec.draft
    if config is None:
        raise UserError(f"{draft_modules.FLAG} does nothing here: no draft of this package decodes; leave it out")
    draft_modules.check_draft_modules(_setting(parallel, dtype, None, config, False, impl))


def _setting(
    parallel: ParallelConfig, dtype: torch.dtype, base: BaseConfig | None, draft: DraftConfig | None, plain: bool,
    impl: TransformerImpl = "local", layers: BaseLayers = LOCAL,
) -> Setting:  # fmt: skip
    """What determines the fast paths of one model."""
    name, engine = str(dtype).removeprefix("torch."), impl == "transformer_engine"
    machine = platform.machine()
    return Setting(
        machine, name, parallel, base, draft, layers=layers, plain=plain, draft_transformer_engine=engine
    )  # fmt: skip


def load_models(
    planned: Plan, world: World, dtype: torch.dtype, plain: bool, impl: TransformerImpl, layers: BaseLayers = LOCAL
) -> Models:
    """Load base and draft. Collective.

    Args:
        plain: no fast paths.
        impl: modules of the draft.
        layers: what the base's layers are built from; a second base, used as draft, has local ones.
    """

    def paths(base: BaseConfig | None = None, draft: DraftConfig | None = None, layers: BaseLayers = LOCAL) -> Paths:
        """Fast paths of one model."""
        own = impl if draft is not None else "local"
        return Paths(_setting(world.parallel, dtype, base, draft, plain, own, layers))

    if planned.folder is not None:
        loaded = load_checkpoint(
            planned.folder,
            world,
            spec=planned.spec,
            dtype=dtype,
            base_path=planned.base,
            layers=layers,
            plain=plain,
            draft_impl=impl,
        )
        found = Models(loaded.base, loaded.draft, teacher_fingerprint(loaded), bool(loaded.base_amax))
    else:
        assert planned.reference is not None
        own = paths(planned.reference.config, layers=layers)
        model = load_exported_base(planned.reference, world, planned.captures, dtype, layers, own)
        quantised = any(getattr(m, "input_quantizer", None) is not None for m in model.modules())
        found = Models(model, None, planned.reference.fingerprint, quantised)
    if planned.kind in ("NGram", "SA", "User"):
        found.draft = None
    elif planned.target is not None:
        own = paths(planned.target.config)
        found.draft = load_exported_base(planned.target, world, dtype=dtype, paths=own)
    elif planned.reading is not None:
        found.draft = load_draft(planned.reading, world, dtype, paths(draft=planned.reading.config))
    for line in path_lines(found, planned.decode):
        log.info("fast path %s", line)
    return found


def path_lines(models: Models, decode: DecodeConfig) -> list[str]:
    """Which fast paths decoding takes, and why not the others."""
    base = models.base.paths if decode.cuda_graphs else models.base.paths.without("cuda_graphs")
    draft = models.draft.paths.lines(("draft_decode",)) if isinstance(models.draft, Draft) else []
    return [*base.lines(OF_DECODING), *draft]


@takes(ValidateRun)
def validate(run: ValidateRun) -> Report:
    """Measure a draft on prompts; writes the report to `output` (default: validate.json in the checkpoint).

    --fp64: a verification of several rows and a step of one row differ in the last bits. In an fp8 base, a last bit at
    the boundary of two codes changes a value by 6 %. In float32 that happens thousands of times per answer, in float64
    practically never, so texts can be compared.

    Raises UserError for invalid input, if possible before any weight is read.
    """
    own_draft = run.load is not None and run.decode.decoding_type not in WITHOUT_DRAFT
    if run.output is None and not own_draft:
        raise UserError("--output: expected a file for the report (the default is for the draft of --load)")
    if any(p is not None and Path(p).resolve() == Path(run.data).resolve() for p in (run.output, run.html_output)):
        raise UserError(f"--data {run.data} is the output, too: it would be overwritten")
    if run.html_output is not None:
        html.require_matplotlib()
    dtype = torch.float64 if run.fp64 else torch.bfloat16 if run.bf16 else torch.float32
    check_file(run.data)
    prompts = read_prompts(run.data, run.num_prompts)
    decode = run.decode if run.draft_lens is None else run.decode.replace(max_draft_len=run.draft_lens[0])
    with _iteration(run.load) as folder:
        planned = plan(folder, run.base, decode, run.parallel, run.tokenizer, True, run.draft_lens)
        check_base_shapes(run, planned.base_config)
        te.check(run.layers, platform.machine())
        planned.check_prompts(prompts, run.chat_template_kwargs)
        check_draft_modules_of(planned, run.parallel, dtype, run.draft_transformer_impl)
        world = distributed.initialize(run.parallel, decode.seed, settings=settings_of(run, **planned.agreed))
        models = load_models(planned, world, dtype, run.plain, run.draft_transformer_impl, run.layers)
    draft = (run.load if own_draft else None) or planned.decode.speculative_model or planned.kind
    return _measure(run, prompts, planned, models, world, str(draft))


def _measure(
    run: ValidateRun, prompts: Sequence[Prompt], planned: Plan, models: Models, world: World, draft: str
) -> Report:
    about: dict[str, Any] = {
        "draft": draft,
        "base": models.fingerprint,
        "decoding_type": planned.kind, "dtype": str(models.base.dtype).removeprefix("torch."), "device": _device(world),
        "fake_quantised_base": models.fake_quantised, "prompts": Path(run.data).name,
    }  # fmt: skip
    if run.plain:
        about["plain"] = True
    if run.chat_template_kwargs:
        about["chat_template_kwargs"] = run.chat_template_kwargs
    if planned.spec is not None:
        about["iteration"] = planned.spec.iteration
    about |= _file_sizes(planned)
    report = run_validation(
        models.base, models.draft, prompts, planned.tokenizer, planned.decode, draft_lens=run.draft_lens, about=about,
        output=run.output or Path(run.load or "") / "validate.json",
        stop_ids=set(stop_token_ids(planned.source, planned.tokenizer)), template_kwargs=run.chat_template_kwargs,
    )  # fmt: skip
    if run.html_output is not None and world.rank == 0:
        html.write_html(run.html_output, {draft: report.to_dict()})
    for measured in report.runs:
        _log_run(measured, report)
    if report.first.text_identical is False and models.fake_quantised and not run.fp64:
        log.info("inputs of an fp8 base round differently in other row shapes; --fp64 checks the text without that")
    return report


def _file_sizes(planned: Plan) -> dict[str, float]:
    """MiB of the exported folders, if there are any: fp8 bases and drafts are smaller there than in memory."""
    named = {"base_files_mib": planned.base, "draft_files_mib": planned.decode.speculative_model}
    folders = {name: model_folder(folder) for name, folder in named.items() if folder}
    sizes = {name: sum(p.stat().st_size for p in f.glob("*.safetensors")) for name, f in folders.items()}
    return {name: round(size / 2**20, 1) for name, size in sizes.items() if size}


def _device(world: World) -> str:
    return torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"


def _log_run(run: Run, report: Report) -> None:
    found = run.acceptance
    low, high = found.acceptance_length_ci95 or (0.0, 0.0)
    text = {True: "identical", None: "not compared", False: f"DIFFERS in {run.differences} answers"}[run.text_identical]
    if run.exact_ties:
        text += f" ({run.exact_ties} more part at exact ties of the two best logits)"
    log.info(
        "draft length %d: acceptance length %.3f (95%% %.3f-%.3f; as engines count %.3f), per position %s; %.1f tok/s "
        "alone, %.1f with the draft; text %s", run.max_draft_len, found.acceptance_length or 0.0, low, high,
        found.engine_acceptance_length or 0.0,
        [round(x, 3) for x in found.acceptance_per_position], report.base.tokens_per_second,
        run.speculative.tokens_per_second, text,
    )  # fmt: skip


@takes(GenerateRun)
def generate(run: GenerateRun) -> int:
    """Generate answers with a base, alone or with a draft. Returns the number of new answers.

    Raises UserError for invalid input, if possible before any weight is read.
    """
    prompts: list[Prompt] = []
    if run.data is not None:
        check_file(run.data)
        prompts = read_prompts(run.data, run.num_prompts)
    with _iteration(run.load) as folder:
        planned = plan(folder, run.base, run.decode, run.parallel, run.tokenizer, draft_needed=False)
        return _generate(run, prompts, planned)


def _generate(run: GenerateRun, prompts: list[Prompt], planned: Plan) -> int:
    output, dtype = run.output, torch.bfloat16 if run.bf16 else torch.float32
    stop_ids = set(stop_token_ids(planned.source, planned.tokenizer))
    asking = planned.decode.replace(temperature=1.0 if run.question_temperature is None else run.question_temperature)
    questions = Path(f"{output}.questions.jsonl")
    # All checks that need no weights come before reading weights.
    kwargs = run.chat_template_kwargs
    about: dict[str, Any] = {"chat_template_kwargs": kwargs} if kwargs else {}
    about["template_hash"] = template_hash(planned.source, kwargs)
    if planned.reference is not None:
        about["base_fingerprint"] = planned.reference.fingerprint
    other = {**_other_text(planned.decode), "dtype": str(dtype).removeprefix("torch.")}
    if run.save_rejections:
        other["rejections"] = _rejecting(planned)
    check_output(output, prompts, answer_settings(planned.decode, stop_ids, {**about, **other}))
    if run.synthesize is not None:
        check_questions(questions, asking, about)
    check_base_shapes(run, planned.base_config)
    te.check(run.layers, platform.machine())
    planned.check_prompts(prompts, kwargs)
    check_draft_modules_of(planned, run.parallel, dtype, run.draft_transformer_impl)
    world = distributed.initialize(run.parallel, run.decode.seed, settings=settings_of(run, **planned.agreed))
    models = load_models(planned, world, dtype, run.plain, run.draft_transformer_impl, run.layers)
    about["base_fingerprint"] = models.fingerprint
    if run.synthesize is not None:
        prompts = write_questions(
            models.base, planned.tokenizer, run.synthesize, asking, questions, stop_ids, about, kwargs,
            run.question_batch_size,
        )  # fmt: skip
    done = synthesize_to_file(
        models.base, planned.tokenizer, prompts, planned.decode, output, draft=models.draft, stop_ids=stop_ids,
        about={**about, **other}, template_kwargs=kwargs, save_rejections=run.save_rejections,
    )  # fmt: skip
    log.info("%d new conversations in %s", done, output)
    return done


def _rejecting(planned: Plan) -> dict[str, Any]:
    """What rejections depend on. Raises UserError when the rejected tokens would not be those of a trained draft."""
    decode = planned.decode
    if decode.decoding_type is None or decode.decoding_type in WITHOUT_DRAFT or planned.target is not None:
        raise UserError("--save-rejections needs a trained draft: give --load or --speculative-model")
    if decode.sa_threshold is not None:
        raise UserError("--save-rejections with --sa-threshold: the tokens would be those of the lookup: leave it out")
    return {**planned.agreed, **_changed(decode, [f.name for f in dataclasses.fields(decode)])}


def _changed(decode: DecodeConfig, names: Sequence[str]) -> dict[str, Any]:
    """The options that are not the default, but for those that are recorded anyway or change only the speed."""
    names = [n for n in names if n not in ("max_new_tokens", "temperature", "seed", "batch_size", "cuda_graphs")]
    default = DecodeConfig()
    return {n: getattr(decode, n) for n in names if getattr(decode, n) != getattr(default, n)}


def _other_text(decode: DecodeConfig) -> dict[str, Any]:
    """Settings besides temperature and seed that change the text; usually none."""
    names = ["top_k", "top_p", "use_rejection_sampling", "typical_acceptance", "use_relaxed_acceptance_for_thinking"]
    if decode.use_rejection_sampling or not decode.lossless:  # then the text depends on the draft and its options, too
        names = [f.name for f in dataclasses.fields(decode)]
    return _changed(decode, names)
