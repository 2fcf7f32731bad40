"""Attach fp8 fake quantisers to base and draft, calibrate their ranges, save the quantised checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron_spec.base import te
from megatron_spec.base.placement import check_parallel
from megatron_spec.batch import Batch
from megatron_spec.build import load_checkpoint, resolve_paths, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import CheckpointSpec, identity, latest_iteration, locked, read_spec, resolve
from megatron_spec.commands.checks import check_base_shapes, check_seq_length, check_steps
from megatron_spec.commands.data import check_file, open_dataset, tokenizer_folder
from megatron_spec.commands.runs import QuantizeRun, settings_of, takes
from megatron_spec.config import ObjectiveConfig, QuantConfig, UserError, presets, suggest
from megatron_spec.config.structure import draft_tensors
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.packing import build_batch
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.planning import layouts
from megatron_spec.quantization import report
from megatron_spec.quantization.attach import base_amax_state, check_draft, check_policy
from megatron_spec.quantization.calibrate import LayerReport, calibrate
from megatron_spec.runtime import distributed, platform
from megatron_spec.runtime.distributed import World, together
from megatron_spec.runtime.files import read_json, read_text
from megatron_spec.runtime.folders import require_empty

log = logging.getLogger(__name__)

PRESETS = {
    "fp8": QuantConfig(),
    "fp8_draft_only": QuantConfig(base="none"),
    "fp8_base_only": QuantConfig(draft="none"),
    "nvfp4_draft_only": QuantConfig(base="none", draft="nvfp4"),
    "none": QuantConfig(base="none", draft="none"),
}


MODELOPT = {
    "FP8_DEFAULT_CFG": "it is fp8 here (E4M3 per tensor, of base and draft)",
    "FP8_KV_CFG": "it is --export-kv-cache-quant fp8 here, beside --export-quant-cfg fp8",
    "NVFP4_DEFAULT_CFG": "here NVFP4 is for drafts: nvfp4_draft_only",
    **dict.fromkeys(
        ("INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG", "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG"),
        "integer formats are not supported: use fp8",
    ),
}
"""ModelOpt's names -> replacement."""


def quant_policy(name: str, kv_cache: str | None = None) -> QuantConfig:
    """The policy of --export-quant-cfg and --export-kv-cache-quant.

    Args:
        name: a preset, or a JSON or YAML file with fields of `QuantConfig`.
        kv_cache: 'none' or 'fp8'; None: the policy's.

    Raises UserError with a suggestion for an unknown preset or field, and for conflicting settings.
    """
    if name in MODELOPT:
        raise UserError(f"--export-quant-cfg {name} is ModelOpt's: {MODELOPT[name]}")
    if name in PRESETS:
        policy = PRESETS[name]
    elif Path(name).suffix in (".json", ".yaml", ".yml"):
        policy = _read_policy(Path(name))
    else:
        raise UserError(
            f"--export-quant-cfg {name!r} is not known{suggest(name, PRESETS)}; known: {', '.join(PRESETS)}, or a "
            ".json or .yaml file"
        )
    if kv_cache is None or kv_cache == policy.kv_cache:
        return policy
    if policy.kv_cache != "none":
        log.info("--export-kv-cache-quant %s replaces the kv_cache of %s, %s", kv_cache, name, policy.kv_cache)
    try:
        return policy.replace(kv_cache=kv_cache)
    except UserError as e:
        raise UserError(f"--export-kv-cache-quant {kv_cache} with --export-quant-cfg {name}: {e}") from None


def _read_policy(path: Path) -> QuantConfig:
    if path.suffix == ".json":
        values = read_json(path, unique=True)
    else:
        import yaml

        try:
            text = read_text(path, "YAML")
            node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
            keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"{twice!r} is there twice")
        except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: a date that does not exist
            raise UserError(f"{path} is not valid YAML: {e}") from None
    if not isinstance(values, dict):
        raise UserError(f"--export-quant-cfg {path} must hold an object with fields of QuantConfig")
    try:
        return QuantConfig.from_dict(values)
    except UserError as e:
        raise UserError(f"--export-quant-cfg {path}: {e}") from None


def calibration_steps(
    dataset: ConversationDataset, world: World, samples: int, micro_batch_size: int
) -> tuple[list[list[Batch]], int]:
    """The micro-batches of this rank's replica, by step, and the number of conversations that all ranks read.

    Each has one conversation, without padding, so that ranges do not depend on the layout. Empty ones make their number
    a multiple of the pipeline stages.
    """
    count, size = min(samples, len(dataset)), micro_batch_size * world.pp_size
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count].tolist()
    rows = [[dataset[i]] for i in order[world.dp_rank :: world.dp_size]]
    while not rows or len(rows) % world.pp_size:
        rows.append([])
    batches = [build_batch([row], max(1, sum(map(len, row))), world.device) for row in rows]
    return [batches[i : i + size] for i in range(0, len(batches), size)], count


@takes(QuantizeRun)
def quantize(run: QuantizeRun) -> Path:
    """Quantise a checkpoint. Returns the iteration folder; calibration.{json,md,png} beside it report every linear.

    The policy 'none' saves the checkpoint unchanged. Raises UserError for invalid input, if possible before any weight
    is read.
    """
    quant = quant_policy(run.policy, run.kv_cache)
    with locked(run.load) as folder:
        spec = read_spec(folder)
        objective = check(run, spec, quant)
        world = distributed.initialize(run.parallel, settings=settings_of(run, load=identity(folder)))
        with distributed.sole_run(run.save, world):
            return _quantize(run, folder, spec, quant, objective, world)


def _quantize(
    run: QuantizeRun, folder: Path, spec: CheckpointSpec, quant: QuantConfig, objective: ObjectiveConfig, world: World
) -> Path:
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    steps, seen = ([], 0) if quant.base == quant.draft == "none" else _steps(run, spec, world)
    loaded = load_checkpoint(
        folder, world, dtype=dtype, base_path=run.base, layers=run.layers, plain=run.plain, spec=spec,
        draft_impl=run.draft_transformer_impl,
    )  # fmt: skip
    run_config = {"policy": run.policy, "samples": run.samples, "quant": quant.to_dict()}
    trained = {name: loaded.extra[name] for name in ("objective",) if name in loaded.extra}  # export.py reads its steps
    if not steps:
        log.info("nothing is quantised, so no data are read: %s is a copy of the checkpoint", run.save)
        plain = respec(loaded.spec, iteration=_iteration(run))
        return sharded.save(run.save, plain, loaded.draft, loaded.vocab, world, extra=trained, run_config=run_config)
    found = calibrate(loaded.base, loaded.draft, OnlineFeatures(loaded.base), steps, objective, quant, world)
    together(lambda: write_report(found, run.save) if world.rank == 0 else None)  # nothing is complete without it
    saved = sharded.save(
        run.save, respec(loaded.spec, quant=quant, iteration=_iteration(run)), loaded.draft, loaded.vocab, world,
        extra=trained, base_amax=base_amax_state(loaded.base) if quant.base != "none" else None, run_config=run_config,
    )  # fmt: skip
    log.info("quantised with %s on %d conversations: %s", run.policy, seen, saved)
    return saved


def _steps(run: QuantizeRun, spec: CheckpointSpec, world: World) -> tuple[list[list[Batch]], int]:
    """`calibration_steps` of the conversations to calibrate on."""
    folder, known = tokenizer_folder(spec, run.base, run.tokenizer), spec.base.config.vocab_size
    kwargs = run.chat_template_kwargs
    dataset = open_dataset(run.data, folder, run.seq_length, vocab_size=known, template_kwargs=kwargs)
    return calibration_steps(dataset, world, run.samples, run.micro_batch_size)


def _into_its_own_folder(run: QuantizeRun) -> bool:
    return Path(run.save).resolve() in (Path(run.load).resolve(), resolve(run.load).parent.resolve())


def _iteration(run: QuantizeRun) -> int:
    """Iteration to save as: 0, or in the folder of --load the one after its latest, so that none is overwritten."""
    latest = latest_iteration(run.save) if _into_its_own_folder(run) else None
    return 0 if latest is None else latest + 1


def _check_read(run: QuantizeRun, quant: QuantConfig) -> None:
    """Raise UserError for flags of the draft's inputs where none are calibrated: nvfp4 quantises weights alone."""
    given = [f"--{name.replace('_', '-')}" for name in ("ttt_steps", "alignment") if run.objective.sets(name)]
    if given and quant.draft != "fp8" and quant.base != quant.draft:  # else nothing is quantised
        raise UserError(
            f"{', '.join(given)}: no effect, because no input of the draft is calibrated (base {quant.base}, draft "
            f"{quant.draft}); leave {'it' if len(given) == 1 else 'them'} out"
        )


def check(run: QuantizeRun, spec: CheckpointSpec, quant: QuantConfig) -> ObjectiveConfig:
    """The objective for this draft. Raises UserError for everything that can be checked without weights."""
    if spec.quant is not None:
        raise UserError(f"--load {run.load} is quantised already: quantise the checkpoint it was made from")
    check_base_shapes(run, spec.base.config)
    check_draft(spec.draft, quant)
    check_policy(quant, spec.base.config, draft_tensors(spec.draft))
    _check_read(run, quant)
    objective = presets.objective_for(spec.draft, run.objective)
    check_file(run.data)
    if not _into_its_own_folder(run):
        require_empty(run.save, "give another --save folder, or remove it to quantise again", report.FILES)
    layouts.check("quantize", run.parallel)
    check_parallel(spec.base.config, run.parallel)
    te.check(run.layers, platform.machine())
    check_seq_length(run.seq_length, spec.base.config)
    check_steps(objective, run.seq_length)
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    resolve_paths(spec, run.parallel, dtype, plain=run.plain, draft_impl=run.draft_transformer_impl)
    return objective


def write_report(found: list[LayerReport], save: str) -> None:
    """Write calibration.{json,md,png}, and log the linear with the largest error."""
    report.write(found, Path(save))
    worst = max(found, key=lambda line: line.input_error or 0.0)
    error = worst.input_error or 0.0
    log.info("largest rounding error of an input: %.3f, %s; all: %s/calibration.md", error, worst.name, save)
