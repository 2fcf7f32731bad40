"""validate.py and generate.py: decoding with the base verifying, from a checkpoint or from a base alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from megatron_spec import distributed, support
from megatron_spec.build import load_checkpoint
from megatron_spec.chain.data import check_file
from megatron_spec.chain.features import teacher_fingerprint, template_hash
from megatron_spec.checkpoint.base_import import inspect_base, load_base
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.config import DecodeConfig, ParallelConfig, UserError
from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_spec.decoding.prompts import read_prompts
from megatron_spec.decoding.synthesize import synthesize_to_file
from megatron_spec.decoding.validate import Report
from megatron_spec.decoding.validate import validate as run_validation
from megatron_spec.pipeline.model import FrozenBase
from megatron_spec.pipeline.placement import check_parallel

log = logging.getLogger(__name__)


def validate(
    load: str, data: str, *, output: str | None = None, num_prompts: int | None = None, base: str | None = None,
    tokenizer: str | None = None, bf16: bool = False, fp64: bool = False, decode: DecodeConfig | None = None,
    parallel: ParallelConfig | None = None,
) -> Report:  # fmt: skip
    """Measure a draft checkpoint on prompts; writes the report to `output` (default: validate.json in the checkpoint).

    Args:
        fp64: compute in float64. A verification of several rows and a step of one row differ in the last bits, and an
            fp8 base turns a last bit next to the edge of two codes into 6 % of that value: in float32 that happens
            thousands of times in an answer, in float64 practically never, so equality of the texts can be checked.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    decode, parallel = decode or DecodeConfig(), parallel or ParallelConfig()
    if bf16 and fp64:
        raise UserError("--bf16 and --fp64: expected one of them")
    dtype = torch.float64 if fp64 else torch.bfloat16 if bf16 else torch.float32
    folder = resolve(load)
    check_parallel(read_spec(folder).base.config, parallel)
    support.check("decode", parallel)
    check_file(data)
    prompts = read_prompts(data, num_prompts)
    world = distributed.initialize(parallel, decode.seed)
    loaded = load_checkpoint(folder, world, dtype=dtype, base_path=base)
    source = tokenizer or str(loaded.base_ref.path)
    opened = load_tokenizer(source)
    report = run_validation(
        loaded.base, loaded.draft, prompts, opened, decode,
        output=output or Path(load) / "validate.json", stop_ids=set(stop_token_ids(source, opened)),
    )  # fmt: skip
    found = report.acceptance
    low, high = found.acceptance_length_ci95 or (0.0, 0.0)
    log.info(
        "acceptance length %.3f (95%% %.3f-%.3f), per position %s; %.1f tok/s alone, %.1f with the draft; text %s",
        found.acceptance_length or 0.0, low, high, [round(x, 3) for x in found.acceptance_per_position],
        report.base.tokens_per_second, report.speculative.tokens_per_second,
        "identical" if report.text_identical else f"DIFFERS in {len(report.mismatches)} answers",
    )  # fmt: skip
    if not report.text_identical and loaded.base_amax and not fp64:
        log.info("inputs of an fp8 base round differently in other row shapes; --fp64 checks the text without that")
    return report


def generate(
    data: str, output: str, *, load: str | None = None, base: str | None = None, num_prompts: int | None = None,
    tokenizer: str | None = None, bf16: bool = False, decode: DecodeConfig | None = None,
    parallel: ParallelConfig | None = None,
) -> int:  # fmt: skip
    """Answer prompts with a base, or with a checkpoint's base and draft. Returns the number of new answers.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    decode, parallel = decode or DecodeConfig(), parallel or ParallelConfig()
    if load is None and base is None:
        raise UserError("give --base for a base model alone, or --load for a draft checkpoint")
    check_file(data)
    support.check("decode", parallel)
    prompts = read_prompts(data, num_prompts)
    if load is not None:
        check_parallel(read_spec(resolve(load)).base.config, parallel)
    model, draft, source, fingerprint = _models(load, base, bf16, decode, parallel)
    source = tokenizer or source
    opened = load_tokenizer(source)
    done = synthesize_to_file(
        model, opened, prompts, decode, output, draft=draft, stop_ids=set(stop_token_ids(source, opened)),
        about={"base_fingerprint": fingerprint, "template_hash": template_hash(source)},
    )  # fmt: skip
    log.info("%d new conversations in %s", done, output)
    return done


def _models(
    load: str | None, base: str | None, bf16: bool, decode: DecodeConfig, parallel: ParallelConfig
) -> tuple[FrozenBase, Any, str, str]:
    """(base, draft or None, the base's folder, identity of the base)."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    if load is not None:
        world = distributed.initialize(parallel, decode.seed)
        loaded = load_checkpoint(load, world, dtype=dtype, base_path=base)
        return loaded.base, loaded.draft, str(loaded.base_ref.path), teacher_fingerprint(loaded)
    assert base is not None
    ref = inspect_base(base)
    check_parallel(ref.config, parallel)
    world = distributed.initialize(parallel, decode.seed)
    return load_base(ref, world, dtype=dtype), None, str(ref.path), ref.fingerprint
