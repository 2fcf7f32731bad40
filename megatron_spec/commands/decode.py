"""validate.py and generate.py: decoding with the base verifying, from a checkpoint, an exported folder or a base."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.base.placement import check_parallel
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint.base_import import BaseReference, load_base
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.commands.convert import check_draft_parallel
from megatron_spec.commands.data import check_file
from megatron_spec.commands.features import teacher_fingerprint, template_hash
from megatron_spec.config import BaseConfig, DecodeConfig, DecodingType, DraftConfig, ParallelConfig, UserError
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.drafters.draft_target import check_tokenizers
from megatron_spec.decoding.drafters.user import find_drafter
from megatron_spec.decoding.options import WITHOUT_DRAFT, check_options, check_undrafted, decoding_type
from megatron_spec.evaluation import html
from megatron_spec.evaluation.report import Report, Run
from megatron_spec.evaluation.validate import check_draft_lens
from megatron_spec.evaluation.validate import validate as run_validation
from megatron_spec.export.formats import Reading
from megatron_spec.export.load import inspect_exported_base, load_draft, load_exported_base, open_draft
from megatron_spec.generation.prompts import Prompt, read_prompts
from megatron_spec.generation.questions import check_questions, write_questions
from megatron_spec.generation.synthesize import answer_settings, check_output, synthesize_to_file
from megatron_spec.planning import layouts
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.hub import model_folder

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """What is to be decoded with what; nothing heavy is read yet.

    Attributes:
        kind: way of drafting; None: the base alone.
        load: draft checkpoint, or None.
        base: folder given for the base, or None.
        reference: the base, unless it comes with the checkpoint.
        captures: base layers whose outputs the draft reads.
        tokenizer: the tokenizer, and the folder it is from.
        decode: the configuration, complete.
        reading: the draft of an exported folder.
    """

    kind: DecodingType | None
    load: str | None
    base: str | None
    reference: BaseReference | None
    captures: Sequence[int]
    tokenizer: Any
    source: str
    decode: DecodeConfig
    reading: Reading | None = None


def _thinking_tokens(decode: DecodeConfig, tokenizer: Any) -> DecodeConfig:
    if not decode.use_relaxed_acceptance_for_thinking:
        return decode
    vocab, changes = tokenizer.get_vocab(), {}
    for name, word in (("begin_thinking_phase_token", "<think>"), ("end_thinking_phase_token", "</think>")):
        if getattr(decode, name) is None:
            changes[name] = vocab.get(word)
    return decode.replace(**changes)


def _draft_of(
    load: str | None, base: str | None, decode: DecodeConfig
) -> tuple[DraftConfig | None, Reading | None, BaseReference | None]:
    """(configuration of the draft, its folder when it is an exported one, the base unless a checkpoint names it)."""
    exported = decode.speculative_model if decode.decoding_type not in WITHOUT_DRAFT else None
    if load is not None:
        if exported is not None:
            raise UserError("--load and --speculative-model are two drafts: give one of them")
        return read_spec(resolve(load)).draft, None, None
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
    load: str | None, base: str | None, decode: DecodeConfig, parallel: ParallelConfig, tokenizer: str | None,
    draft_needed: bool,
) -> Plan:  # fmt: skip
    """Find out what is meant. Raises UserError for what does not fit together; no weight is read.

    Args:
        draft_needed: without a draft there is nothing to do; else the base decodes alone.
    """
    config, reading, reference = _draft_of(load, base, decode)
    algorithm = config.algorithm if config is not None else None
    kind = None
    if draft_needed or algorithm is not None or decode.decoding_type is not None:
        kind = decoding_type(algorithm, decode.decoding_type)
    base_config: BaseConfig = reference.config if reference else read_spec(resolve(load or "")).base.config
    layouts.check("decode", parallel)
    check_parallel(base_config, parallel)
    if config is not None:
        check_draft_parallel(config, parallel)
    source = tokenizer or base or read_spec(resolve(load or "")).base.path
    opened = load_tokenizer(source)
    decode = _thinking_tokens(decode, opened).replace(decoding_type=kind)
    if kind is None:
        check_undrafted(decode)
    else:
        check_options(decode, kind)
    if kind == "User":
        find_drafter(decode.drafter or "")
    if kind == "DraftTarget":
        assert decode.speculative_model is not None
        check_parallel(inspect_exported_base(decode.speculative_model).config, parallel)
        check_tokenizers(opened, load_tokenizer(decode.speculative_model), decode.speculative_model)
    reads = ("Eagle3", "Eagle", "MTP", "DFlash", "DSpark")
    captures = config.capture_layer_ids if config is not None and kind in reads else ()
    return Plan(kind, load, base, reference, captures, opened, source, decode, reading)


@dataclass
class Models:
    """Base and draft on this rank.

    Attributes:
        draft: draft model, second base model, or None.
        fingerprint: identity of the base.
        fake_quantised: the base rounds its inputs to fp8.
    """

    base: FrozenBase
    draft: Any
    fingerprint: str
    fake_quantised: bool


def load_models(planned: Plan, world: World, dtype: torch.dtype) -> Models:
    """Read what was planned. Collective."""
    if planned.load is not None:
        loaded = load_checkpoint(planned.load, world, dtype=dtype, base_path=planned.base)
        found = Models(loaded.base, loaded.draft, teacher_fingerprint(loaded), bool(loaded.base_amax))
    else:
        assert planned.reference is not None
        model = load_exported_base(planned.reference, world, planned.captures, dtype)
        quantised = any(getattr(m, "input_quantizer", None) is not None for m in model.modules())
        found = Models(model, None, planned.reference.fingerprint, quantised)
    folder = planned.decode.speculative_model
    if planned.kind in ("NGram", "User"):
        found.draft = None
    elif planned.kind == "DraftTarget":
        assert folder is not None
        found.draft = load_base(inspect_exported_base(folder), world, dtype=dtype)
    elif planned.reading is not None:
        found.draft = load_draft(planned.reading, world, dtype)
    return found


def validate(
    data: str, *, load: str | None = None, base: str | None = None, output: str | None = None,
    html_output: str | None = None, draft_lens: Sequence[int] | None = None, num_prompts: int | None = None,
    tokenizer: str | None = None, bf16: bool = False, fp64: bool = False, decode: DecodeConfig | None = None,
    parallel: ParallelConfig | None = None,
) -> Report:  # fmt: skip
    """Measure a draft on prompts; writes the report to `output` (default: validate.json in the checkpoint).

    Args:
        draft_lens: draft lengths to measure; default: decode.max_draft_len.
        html_output: the same as a page with plots.
        fp64: compute in float64. A verification of several rows and a step of one row differ in the last bits, and an
            fp8 base turns a last bit next to the edge of two codes into 6 % of that value: in float32 that happens
            thousands of times in an answer, in float64 practically never, so equality of the texts can be checked.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    decode, parallel = decode or DecodeConfig(), parallel or ParallelConfig()
    if bf16 and fp64:
        raise UserError("--bf16 and --fp64: expected one of them")
    own_draft = load is not None and decode.decoding_type not in WITHOUT_DRAFT
    if output is None and not own_draft:
        raise UserError("--output: expected a file for the report (the default is for the draft of --load)")
    if any(p is not None and Path(p).resolve() == Path(data).resolve() for p in (output, html_output)):
        raise UserError(f"--data {data} is the output, too: it would be overwritten")
    check_draft_lens(draft_lens or (decode.max_draft_len,))
    if html_output is not None:
        html.require_matplotlib()
    dtype = torch.float64 if fp64 else torch.bfloat16 if bf16 else torch.float32
    check_file(data)
    prompts = read_prompts(data, num_prompts)
    planned = plan(load, base, decode, parallel, tokenizer, draft_needed=True)
    world = distributed.initialize(parallel, decode.seed)
    models = load_models(planned, world, dtype)
    about: dict[str, Any] = {
        "draft": (load if own_draft else None) or planned.decode.speculative_model or planned.kind,
        "base": models.fingerprint,
        "decoding_type": planned.kind, "dtype": str(dtype).removeprefix("torch."), "device": _device(world),
        "fake_quantised_base": models.fake_quantised, "prompts": Path(data).name,
    }  # fmt: skip
    if load is not None:
        about["iteration"] = read_spec(resolve(load)).iteration
    about |= _file_sizes(planned)
    report = run_validation(
        models.base, models.draft, prompts, planned.tokenizer, planned.decode, draft_lens=draft_lens, about=about,
        output=output or Path(load or "") / "validate.json",
        stop_ids=set(stop_token_ids(planned.source, planned.tokenizer)),
    )  # fmt: skip
    if html_output is not None and world.rank == 0:
        html.write_html(html_output, {str(about["draft"]): report.to_dict()})
    for run in report.runs:
        _log_run(run, report)
    if report.first.text_identical is False and models.fake_quantised and not fp64:
        log.info("inputs of an fp8 base round differently in other row shapes; --fp64 checks the text without that")
    return report


def _file_sizes(planned: Plan) -> dict[str, float]:
    """MiB of the folders that are served, where there are any: an fp8 base or draft is that small only there."""
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


def generate(
    data: str | None, output: str, *, load: str | None = None, base: str | None = None, num_prompts: int | None = None,
    tokenizer: str | None = None, bf16: bool = False, decode: DecodeConfig | None = None,
    parallel: ParallelConfig | None = None, synthesize: int | None = None, question_temperature: float | None = None,
) -> int:  # fmt: skip
    """Answer prompts with a base, alone or with a draft. Returns the number of new answers.

    Args:
        synthesize: instead of `data`: the base writes this many questions itself, into OUTPUT.questions.jsonl.
        question_temperature: for sampling them; default 1.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    decode, parallel = decode or DecodeConfig(), parallel or ParallelConfig()
    if load is None and base is None:
        raise UserError("give --base for a base model alone, or --load for a draft checkpoint")
    if (data is None) == (synthesize is None):
        raise UserError("expected one of --data (prompts) and --synthesize (the base writes them)")
    if synthesize is None and question_temperature is not None:
        raise UserError("--question-temperature is for --synthesize: leave it out with --data")
    prompts: list[Prompt] = []
    if data is not None:
        check_file(data)
        prompts = read_prompts(data, num_prompts)
    planned = plan(load, base, decode, parallel, tokenizer, draft_needed=False)
    dtype = torch.bfloat16 if bf16 else torch.float32
    stop_ids = set(stop_token_ids(planned.source, planned.tokenizer))
    asking = planned.decode.replace(temperature=1.0 if question_temperature is None else question_temperature)
    questions = Path(f"{output}.questions.jsonl")
    # Before any weight is read: all that is known without them.
    about: dict[str, Any] = {"template_hash": template_hash(planned.source)}
    if planned.reference is not None:
        about["base_fingerprint"] = planned.reference.fingerprint
    other = {**_other_text(planned.decode), "dtype": str(dtype).removeprefix("torch.")}
    check_output(output, prompts, answer_settings(planned.decode, stop_ids, {**about, **other}))
    if synthesize is not None:
        check_questions(questions, asking, about)
    world = distributed.initialize(parallel, decode.seed)
    models = load_models(planned, world, dtype)
    about["base_fingerprint"] = models.fingerprint
    if synthesize is not None:
        prompts = write_questions(models.base, planned.tokenizer, synthesize, asking, questions, stop_ids, about)
    done = synthesize_to_file(
        models.base, planned.tokenizer, prompts, planned.decode, output, draft=models.draft, stop_ids=stop_ids,
        about={**about, **other},
    )  # fmt: skip
    log.info("%d new conversations in %s", done, output)
    return done


def _other_text(decode: DecodeConfig) -> dict[str, Any]:
    """Settings, other than temperature and seed, under which the text is another one; usually none."""
    names = ["top_k", "top_p", "use_rejection_sampling", "typical_acceptance", "use_relaxed_acceptance_for_thinking"]
    if decode.use_rejection_sampling or not decode.lossless:  # then the draft and its options shape the text too
        names = [f.name for f in dataclasses.fields(decode)]
        names = [n for n in names if n not in ("max_new_tokens", "temperature", "seed", "batch_size", "cuda_graphs")]
    default = DecodeConfig()
    return {n: getattr(decode, n) for n in names if getattr(decode, n) != getattr(default, n)}
