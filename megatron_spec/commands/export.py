"""Checkpoint -> folders that engines load, verified by reading them back, and a serving configuration."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.placement import check_parallel
from megatron_spec.build import load_checkpoint, resolve_paths, respec
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, locked, read_spec
from megatron_spec.commands.checks import check_base_shapes
from megatron_spec.commands.runs import ExportRun, settings_of, takes
from megatron_spec.config import (
    BaseConfig,
    BlockConfig,
    DecodeConfig,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    UserError,
    flag_name,
)
from megatron_spec.config.rope import read_rope
from megatron_spec.decoding.options import check_lengths
from megatron_spec.export import speculators, trtllm_legacy
from megatron_spec.export.base import export_base
from megatron_spec.export.common import shared_folder
from megatron_spec.export.draft import export_draft
from megatron_spec.export.served import check_exportable, lost_engines
from megatron_spec.families import config_json
from megatron_spec.planning import layouts
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import together
from megatron_spec.runtime.files import write_text
from megatron_spec.runtime.folders import require_empty
from megatron_spec.serving.draft import exported
from megatron_spec.serving.trtllm import trtllm_yaml

log = logging.getLogger(__name__)


def _check(run: ExportRun, spec: CheckpointSpec) -> CheckpointSpec:
    """The checkpoint's spec as exported. Raises UserError for everything that can be checked without weights."""
    algorithm, quant = spec.draft.algorithm, spec.quant
    heads = isinstance(spec.draft, MedusaConfig)
    check_base_shapes(run, spec.base.config)
    if not run.extra_modules and not (_quantised_base(spec) or run.with_base):
        raise UserError(
            "nothing to export: the base is not quantised and --export-extra-modules is not given; add "
            "--export-extra-modules for the draft or --export-base for the base"
        )
    on_disk = Path(run.base or spec.base.path)
    if run.with_base and (on_disk / "hf_quant_config.json").is_file():
        raise UserError(f"--export-base: {on_disk} is already quantised in the engines' format: serve that folder")
    alone = ("export_embeddings", "medusa_pt", "max_draft_len", "yarn_factor") if not run.extra_modules else ()
    for name in alone:
        if getattr(run, name):
            flag = flag_name(run.__dataclass_fields__[name])
            raise UserError(f"--{flag} concerns the draft: add --export-extra-modules, or leave it out")
    why = _no_yaml(spec.draft, spec.base.config)
    if run.max_draft_len and run.format != "speculators" and (run.format != "hf" or why):
        raise UserError(
            f"--max-draft-len: no serving configuration is written for {algorithm} in the format {run.format}; "
            "tools/make_serving_config.py writes one"
        )
    if run.max_draft_len:
        check_lengths(DecodeConfig(), (run.max_draft_len,), spec.draft)
    if run.export_embeddings and heads:
        raise UserError("--export-embeddings: a Medusa draft has no embedding")
    if run.medusa_pt and not heads:
        raise UserError(f"--export-medusa-pt: this draft is {algorithm}, and only Medusa heads have that format")
    if run.format != "hf" and not run.extra_modules:
        raise UserError(f"--export-format {run.format} is a format for drafts: add --export-extra-modules, or use hf")
    if run.trtllm_tp != 1 and run.format != "trtllm-legacy":
        raise UserError("--trtllm-tp needs --export-format trtllm-legacy: leave it out")
    if run.format == "trtllm-legacy":
        if not heads:
            raise UserError(
                f"--export-format trtllm-legacy is written for Medusa, this draft is {algorithm}: use hf, which the "
                "PyTorch backend of TensorRT-LLM (EAGLE-3) and its own converters (EAGLE-1) read"
            )
        trtllm_legacy.check(config_json(spec.base.config), run.trtllm_tp)
    if run.format == "speculators":
        speculators.check(spec.draft, quant is not None and quant.draft != "none")
    as_exported = _with_yarn(run, spec)
    require_empty(run.export_dir, "give another --export-dir, or remove it to export again", replaced=True)
    layouts.check("export", run.parallel)
    check_parallel(spec.base.config, run.parallel)
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    resolve_paths(spec, run.parallel, dtype, layers=run.layers, plain=run.plain, draft_impl=run.draft_transformer_impl)
    return as_exported


def _no_yaml(draft: DraftConfig, base: BaseConfig) -> str | None:
    """Why there is no file for TensorRT-LLM's PyTorch backend, which does not serve this draft; None if it does."""
    if isinstance(draft, BlockConfig) or (isinstance(draft, EagleConfig) and draft.reads_captures):
        return lost_engines(draft, base).get("trtllm")
    return f"it has no {draft.algorithm}"


def _with_yarn(run: ExportRun, spec: CheckpointSpec) -> CheckpointSpec:
    """The checkpoint's spec, with the YaRN of --export-yarn-factor in the draft if given."""
    factor, original, draft = run.yarn_factor, run.yarn_original, spec.draft
    if factor is None and original is None:
        return spec
    if factor is None or original is None or factor <= 1:
        raise UserError(
            f"--export-yarn-factor {factor} with --export-yarn-original {original}: give both, and a factor above 1"
        )
    if run.format != "hf":
        raise UserError(f"--export-yarn-factor needs --export-format hf, found {run.format}")
    if isinstance(draft, MedusaConfig) or draft.of_base or draft.rope.type != "default":
        kind = "none of its own" if isinstance(draft, MedusaConfig) or draft.of_base else draft.rope.type
        raise UserError(f"--export-yarn-factor extends a default rotary embedding, this draft has {kind}: leave it out")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    rope = read_rope({"rope_theta": draft.rope.theta, "rope_scaling": scaling}, "--export-yarn-factor")
    extended = draft.replace(rope=rope)
    check_exportable(extended, spec.base.config)
    return respec(spec, draft=extended)


def _quantised_base(spec: CheckpointSpec) -> bool:
    return spec.quant is not None and spec.quant.base != "none"


@takes(ExportRun)
def export(run: ExportRun) -> Path:
    """Write EXPORT_DIR/draft and, for a fake-quantised base or on request, EXPORT_DIR/base.

    A trtllm-legacy checkpoint, EXPORT_DIR/trtllm, contains base and draft.

    Raises:
        UserError: invalid input.
        VerificationError: the files differ from the model in memory; nothing is published.
    """
    with locked(run.load) as folder:
        spec = _check(run, read_spec(folder))
        world = distributed.initialize(run.parallel, settings=settings_of(run, load=identity(folder)))
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        loaded = load_checkpoint(
            folder, world, dtype=dtype, base_path=run.base, layers=run.layers, plain=run.plain, spec=spec,
            draft_impl=run.draft_transformer_impl,
        )  # fmt: skip
    out = Path(run.export_dir).resolve()
    run_config = {
        "checkpoint": str(folder), "quant": spec.quant.to_dict() if spec.quant else None,
        "ttt_steps": loaded.extra.get("objective", {}).get("ttt_steps"),
    }  # fmt: skip
    legacy, with_base = run.format == "trtllm-legacy", _quantised_base(spec) or run.with_base
    of_base = getattr(spec.draft, "of_base", False)
    with shared_folder(out, world, overwrite=False) as new:  # publishes base and draft together
        if run.extra_modules:
            asked: dict[str, Any] = {"also_pt": True} if run.medusa_pt else {}
            own = getattr(spec.draft, "own_embedding", False)  # always written
            if run.export_embeddings or (run.format == "speculators" and not own):
                asked["export_embeddings"] = True
            export_draft(
                loaded.draft, loaded.base_ref, new / "draft", spec.quant, world, ends=loaded.base,
                run_config=run_config, **asked,
            )  # fmt: skip
        if with_base or legacy:
            export_base(
                loaded.base, loaded.base_ref, new / "base", spec.quant, world,
                trained_module=new / "draft" if run.extra_modules and of_base else None, run_config=run_config,
            )  # fmt: skip
        together(lambda: _finish(run, spec, new, out, Path(loaded.base_ref.path)) if world.rank == 0 else None)
    if run.extra_modules and spec.draft.is_module:
        _say_who_loads_mtp(of_base, with_base)
    if run.yarn_factor is not None:
        log.warning(
            "the draft was trained without YaRN: measure the export with validate.py --speculative-model on short and "
            "long prompts"
        )
    log.info("exported %s", out)
    return out


def _say_who_loads_mtp(of_base: bool, with_base: bool) -> None:
    if not of_base:
        log.warning("no engine loads an MTP draft of this base: the folder is in a format of this package")
    elif not with_base:
        log.warning("engines read a prediction module in the folder of its base: add --export-base for a base with it")


def _finish(run: ExportRun, spec: CheckpointSpec, new: Path, out: Path, base: Path) -> None:
    """Write, on rank 0, the files that are derived from the verified Hugging Face folders."""
    if not run.extra_modules:
        return
    if run.format == "trtllm-legacy":
        trtllm_legacy.convert(new / "base", new / "draft", new / "trtllm", run.trtllm_tp)
        if not (_quantised_base(spec) or run.with_base):
            shutil.rmtree(new / "base")
        shutil.rmtree(new / "draft")
    elif run.format == "speculators":
        (new / "draft").rename(new / "hf")
        speculators.convert(new / "hf", base, new / "draft", run.max_draft_len or 3)
        shutil.rmtree(new / "hf")
    else:
        served = out / "base" if (new / "base").is_dir() else base
        _write_yaml(run, spec, new, out, served)


def _write_yaml(run: ExportRun, spec: CheckpointSpec, new: Path, out: Path, served: Path) -> None:
    """Write trtllm.yaml, with the command that serves the target `served`, if TensorRT-LLM loads the draft."""
    if why := _no_yaml(spec.draft, spec.base.config):
        if spec.draft.capture_layer_ids:
            log.warning("no trtllm.yaml: TensorRT-LLM does not serve this draft: %s", why)
        return
    plan = exported(new / "draft", run.max_draft_len, place=out / "draft")
    if "trtllm" in plan.unserved:
        log.warning("no trtllm.yaml: TensorRT-LLM does not load this draft: %s", plan.unserved["trtllm"])
        return
    write_text(new / "trtllm.yaml", trtllm_yaml(plan, str(served), str(out / "trtllm.yaml")))
