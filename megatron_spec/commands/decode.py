"""validate.py and generate.py: decoding with the base verifying, from a checkpoint, an exported folder or a base."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base import te
from megatron_spec.commands.checks import check_base_shapes
from megatron_spec.commands.data import check_file
from megatron_spec.commands.decode_inputs import (
    Inputs,
    Models,
    check_draft_modules_of,
    iteration_of,
    load_models,
    resolve,
)
from megatron_spec.commands.features import template_hash
from megatron_spec.commands.runs import GenerateRun, ValidateRun, settings_of, takes
from megatron_spec.config import (
    DecodeConfig,
    UserError,
)
from megatron_spec.decoding.options import (
    WITHOUT_DRAFT,
)
from megatron_spec.evaluation import html
from megatron_spec.evaluation.report import Report, Run, require_report
from megatron_spec.evaluation.validate import validate as run_validation
from megatron_spec.generation.prompts import Prompt, read_prompts
from megatron_spec.generation.questions import check_questions, drawn, write_questions
from megatron_spec.generation.synthesize import answer_settings, check_output, synthesize_to_file
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.hub import model_folder

log = logging.getLogger(__name__)


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
        raise UserError("give --output, a file for the report: without a draft in --load it has no folder")
    _check_outputs(run)
    dtype = torch.float64 if run.fp64 else torch.bfloat16 if run.bf16 else torch.float32
    check_file(run.data)
    prompts = read_prompts(run.data, run.num_prompts)
    decode = run.decode if run.draft_lens is None else run.decode.replace(max_draft_len=run.draft_lens[0])
    with ExitStack() as owned:
        with iteration_of(run.load) as folder:
            inputs = resolve(folder, run.base, decode, run.parallel, run.tokenizer, True, run.draft_lens)
            check_base_shapes(run, inputs.base_config)
            te.check(run.layers, platform.machine())
            inputs.check_prompts(prompts, run.chat_template_kwargs)
            check_draft_modules_of(inputs, run.parallel, dtype, run.draft_transformer_impl)
            world = distributed.initialize(run.parallel, decode.seed, settings=settings_of(run, **inputs.agreed))
            owned.enter_context(distributed.sole_run(_report_path(run), world, file=True))
            models = load_models(inputs, world, dtype, run.plain, run.draft_transformer_impl, run.layers)
        draft = (run.load if own_draft else None) or inputs.decode.speculative_model or inputs.kind
        return _measure(run, prompts, inputs, models, world, str(draft))


def _report_path(run: ValidateRun) -> Path:
    return Path(run.output or Path(run.load or "") / "validate.json")


def _check_outputs(run: ValidateRun) -> None:
    """Raise UserError for an output that is a folder, the prompts, another output, or a file of another kind."""
    report = _report_path(run)
    files = (report, run.html_output)
    outputs = [Path(path).resolve() for path in files if path is not None]
    if Path(run.data).resolve() in outputs:
        raise UserError(f"--data {run.data} is also the output: it would be overwritten")
    if len(set(outputs)) < len(outputs):
        raise UserError(f"--html {run.html_output} is also the report's file: give another one")
    require_report(report)
    if run.html_output is not None:
        html.require_page(run.html_output)


def _measure(
    run: ValidateRun, prompts: Sequence[Prompt], inputs: Inputs, models: Models, world: World, draft: str
) -> Report:
    about: dict[str, Any] = {
        "draft": draft,
        "base": models.fingerprint,
        "decoding_type": inputs.kind, "dtype": str(models.base.dtype).removeprefix("torch."), "device": _device(world),
        "fake_quantised_base": models.fake_quantised, "prompts": Path(run.data).name,
        "tokenizer": template_hash(inputs.source),
    }  # fmt: skip
    about |= _implementation(run)
    if run.chat_template_kwargs:
        about["chat_template_kwargs"] = run.chat_template_kwargs
    if inputs.spec is not None:
        about["iteration"] = inputs.spec.iteration
    if inputs.draft_identity is not None:
        about["draft_identity"] = inputs.draft_identity
    about |= _file_sizes(inputs)
    report = run_validation(
        models.base, models.draft, prompts, inputs.tokenizer, inputs.decode, draft_lens=run.draft_lens, about=about,
        output=_report_path(run),
        stop_ids=inputs.stop_ids, template_kwargs=run.chat_template_kwargs,
    )  # fmt: skip
    if run.html_output is not None and world.rank == 0:
        html.write_html(run.html_output, {draft: report.to_dict()})
    for measured in report.runs:
        _log_run(measured, report)
    log.info("report: %s", " and ".join(filter(None, (str(_report_path(run)), run.html_output))))
    if report.first.text_identical is False and models.fake_quantised and not run.fp64:
        log.info("an fp8 base rounds inputs differently in batches of other sizes; --fp64 compares texts without this")
    return report


def _implementation(run: ValidateRun) -> dict[str, Any]:
    """What computes, where it is not the default: it decides speed and rounding."""
    found = {
        "plain": run.plain, "transformer_impl": run.layers.transformer_impl,
        "draft_transformer_impl": run.draft_transformer_impl,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value not in (False, "local")}


def _file_sizes(inputs: Inputs) -> dict[str, float]:
    """MiB of the exported folders, if there are any: fp8 bases and drafts are smaller there than in memory."""
    named = {"base_files_mib": inputs.base, "draft_files_mib": inputs.decode.speculative_model}
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
    counted = found.engine_acceptance_length
    log.info(
        "draft length %d: acceptance length %.3f (95%% %.3f-%.3f; %s), per position %s; %.1f tok/s "
        "alone, %.1f with the draft; text %s", run.max_draft_len, found.acceptance_length or 0.0, low, high,
        "no step drafted" if counted is None else f"as engines count {counted:.3f}",
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
        if run.synthesize is not None and (same := next((p for p in prompts if drawn(p.identifier)), None)):
            raise UserError(
                f"{same.where}: identifier {same.identifier!r} is reserved for synthesised questions: rename it, or "
                "leave --synthesize out"
            )
    with iteration_of(run.load) as folder:
        inputs = resolve(folder, run.base, run.decode, run.parallel, run.tokenizer, draft_needed=False)
        return _generate(run, prompts, inputs)


def _generate(run: GenerateRun, prompts: list[Prompt], inputs: Inputs) -> int:
    output, dtype = run.output, torch.bfloat16 if run.bf16 else torch.float32
    stop_ids = inputs.stop_ids
    asking = inputs.decode.replace(temperature=1.0 if run.question_temperature is None else run.question_temperature)
    questions = Path(f"{output}.questions.jsonl")
    # All checks that need no weights come before reading weights.
    kwargs = run.chat_template_kwargs
    about: dict[str, Any] = {"chat_template_kwargs": kwargs} if kwargs else {}
    about["template_hash"] = template_hash(inputs.source, kwargs)
    about |= {"dtype": str(dtype).removeprefix("torch."), "stop_ids": sorted(stop_ids)}
    if inputs.reference is not None:
        about["base_fingerprint"] = inputs.reference.fingerprint
    other = _other_text(inputs)
    if run.save_rejections:
        other["rejections"] = _rejecting(inputs)
    check_output(output, prompts, answer_settings(inputs.decode, stop_ids, {**about, **other}))
    if run.synthesize is not None:
        check_questions(questions, asking, about)
    check_base_shapes(run, inputs.base_config)
    te.check(run.layers, platform.machine())
    inputs.check_prompts(prompts, kwargs)
    check_draft_modules_of(inputs, run.parallel, dtype, run.draft_transformer_impl)
    world = distributed.initialize(run.parallel, run.decode.seed, settings=settings_of(run, **inputs.agreed))
    with distributed.sole_run(output, world, file=True):
        models = load_models(inputs, world, dtype, run.plain, run.draft_transformer_impl, run.layers)
        about["base_fingerprint"] = models.fingerprint
        if run.synthesize is not None:
            prompts += write_questions(
                models.base, inputs.tokenizer, run.synthesize, asking, questions, stop_ids, about, kwargs,
                run.question_batch_size,
            )  # fmt: skip
        done = synthesize_to_file(
            models.base, inputs.tokenizer, prompts, inputs.decode, output, draft=models.draft, stop_ids=stop_ids,
            about={**about, **other}, template_kwargs=kwargs, save_rejections=run.save_rejections,
        )  # fmt: skip
    log.info("%d new conversations in %s", done, output)
    return done


def _rejecting(inputs: Inputs) -> dict[str, Any]:
    """What rejections depend on. Raises UserError when the rejected tokens would not be those of a trained draft."""
    decode = inputs.decode
    if decode.decoding_type is None or decode.decoding_type in WITHOUT_DRAFT or inputs.target is not None:
        raise UserError("--save-rejections needs a trained draft: give --load or --speculative-model")
    if decode.sa_threshold is not None:
        raise UserError("--save-rejections with --sa-threshold: the tokens would be those of the lookup: leave it out")
    return {"draft": inputs.draft_identity, **_changed(decode, [f.name for f in dataclasses.fields(decode)])}


def _changed(decode: DecodeConfig, names: Sequence[str]) -> dict[str, Any]:
    """The options that are not the default, but for those that are recorded anyway or change only the speed."""
    names = [n for n in names if n not in ("max_new_tokens", "temperature", "seed", "batch_size", "cuda_graphs")]
    default = DecodeConfig()
    return {n: getattr(decode, n) for n in names if getattr(decode, n) != getattr(default, n)}


def _other_text(inputs: Inputs) -> dict[str, Any]:
    """Settings besides temperature and seed that change the text; usually none."""
    decode, found = inputs.decode, dict[str, Any]()
    names = ["top_k", "top_p", "use_rejection_sampling", "typical_acceptance", "use_relaxed_acceptance_for_thinking"]
    if decode.use_rejection_sampling or not decode.lossless:  # then the text depends on the draft and its options, too
        names = [f.name for f in dataclasses.fields(decode)]
        found["draft"] = inputs.draft_identity
    return {**found, **_changed(decode, names)}
