"""Attach fp8 fake quantisers to base and draft, calibrate their ranges, save the quantised checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.placement import check_parallel
from megatron_spec.build import load_checkpoint, respec
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.commands.data import check_file, check_seq_length, open_dataset, tokenizer_folder
from megatron_spec.config import ObjectiveConfig, ParallelConfig, QuantConfig, UserError, presets, suggest
from megatron_spec.data.loader import BatchLoader, ConversationDataset
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.planning import layouts
from megatron_spec.quantization import report
from megatron_spec.quantization.attach import base_amax_state, check_draft
from megatron_spec.quantization.calibrate import calibrate
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from megatron_spec.runtime.files import read_json, require_empty

log = logging.getLogger(__name__)

PRESETS = {
    "fp8": QuantConfig(),
    "fp8_draft_only": QuantConfig(base="none"),
    "fp8_base_only": QuantConfig(draft="none"),
    "nvfp4_draft_only": QuantConfig(base="none", draft="nvfp4"),
    "none": QuantConfig(base="none", draft="none"),
}


def quant_policy(name: str, kv_cache: str | None = None) -> QuantConfig:
    """The policy that --export-quant-cfg and --export-kv-cache-quant describe.

    Args:
        name: a preset, or a JSON or YAML file with fields of `QuantConfig`.
        kv_cache: 'none' or 'fp8'; None keeps what the policy says.

    Raises UserError with a suggestion for an unknown preset or field, and for a contradiction.
    """
    if name in PRESETS:
        policy = PRESETS[name]
    elif Path(name).suffix in (".json", ".yaml", ".yml"):
        policy = _read_policy(Path(name))
    else:
        raise UserError(
            f"--export-quant-cfg {name!r} is not known{suggest(name, PRESETS)}; known: {', '.join(PRESETS)}, or a "
            ".json or .yaml file"
        )
    if kv_cache is None:
        return policy
    try:
        return policy.replace(kv_cache=kv_cache)
    except UserError as e:
        raise UserError(f"--export-kv-cache-quant {kv_cache} with --export-quant-cfg {name}: {e}") from None


def _read_policy(path: Path) -> QuantConfig:
    if path.suffix == ".json":
        values = read_json(path)
    else:
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{path} does not exist") from None
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise UserError(f"{path} is not valid YAML: {e}") from None
    if not isinstance(values, dict):
        raise UserError(f"--export-quant-cfg {path} must hold an object with fields of QuantConfig")
    try:
        return QuantConfig.from_dict(values)
    except UserError as e:
        raise UserError(f"--export-quant-cfg {path}: {e}") from None


def calibration_loader(
    dataset: ConversationDataset, world: World, samples: int, micro_batch_size: int, sequence_parallel: bool
) -> tuple[BatchLoader, int]:
    """A loader whose every step fills all pipeline and data ranks, and the number of its steps for `samples`."""
    per_step = micro_batch_size * world.dp_size * world.pp_size
    loader = BatchLoader(
        dataset,
        micro_batch_size=micro_batch_size,
        global_batch_size=per_step,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        seed=0,
        pad_multiple=world.tp_size if sequence_parallel else 1,
        device=world.device,
    )
    return loader, max(1, min(samples, len(dataset)) // per_step)


def quantize(
    load: str, save: str, data: str, *, policy: str = "fp8", kv_cache: str | None = None, samples: int = 256,
    seq_length: int = 2048, micro_batch_size: int = 4, base: str | None = None, tokenizer: str | None = None,
    bf16: bool = False, objective: ObjectiveConfig | None = None, parallel: ParallelConfig | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Quantise a checkpoint. Returns the iteration folder; calibration.{json,md,png} beside it show every linear.

    Args:
        policy, kv_cache: see `quant_policy`; 'none' saves the checkpoint as it is.
        template_kwargs: see `ChatTemplate`.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    parallel, objective = parallel or ParallelConfig(), objective or ObjectiveConfig()
    quant = quant_policy(policy, kv_cache)
    for flag, number in (("--calib-samples", samples), ("--micro-batch-size", micro_batch_size)):
        if number < 1:
            raise UserError(f"{flag} must be at least 1, found {number}")
    folder = resolve(load)
    spec = read_spec(folder)
    if spec.quant is not None:
        raise UserError(f"--load {load} is quantised already: quantise the checkpoint it was made from")
    check_draft(spec.draft, quant)
    objective = presets.objective_for(spec.draft, objective)
    check_file(data)
    require_empty(save, "give another --save folder, or remove it to quantise again")
    layouts.check("quantize", parallel)
    check_parallel(spec.base.config, parallel)
    check_seq_length(seq_length, spec)
    world = distributed.initialize(parallel)
    texts, known = tokenizer_folder(spec, base, tokenizer), spec.base.config.vocab_size
    if not quant.base == quant.draft == "none":
        dataset = open_dataset(data, texts, seq_length, vocab_size=known, template_kwargs=template_kwargs)
    loaded = load_checkpoint(folder, world, dtype=torch.bfloat16 if bf16 else torch.float32, base_path=base)
    run_config = {"policy": policy, "samples": samples, "quant": quant.to_dict()}
    if quant.base == quant.draft == "none":
        log.info("nothing is quantised: %s holds the checkpoint as it was", save)
        plain = respec(loaded.spec, iteration=0)
        return sharded.save(save, plain, loaded.draft, loaded.vocab, world, run_config=run_config)
    loader, steps = calibration_loader(dataset, world, samples, micro_batch_size, parallel.sequence_parallel)
    batches = [loader.step(i * loader.global_batch_size) for i in range(steps)]
    source = OnlineFeatures(loaded.base)
    found = calibrate(loaded.base, loaded.draft, source, batches, objective, quant, world)
    base_amax = base_amax_state(loaded.base) if quant.base != "none" else None
    saved = sharded.save(
        save, respec(loaded.spec, quant=quant, iteration=0), loaded.draft, loaded.vocab, world,
        base_amax=base_amax, run_config=run_config,
    )  # fmt: skip
    if world.rank == 0:
        report.write(found, Path(save))
        worst = max(found, key=lambda line: line.input_error or 0.0)
        log.info(
            "largest rounding error of an input: %.3f, %s; all: %s/calibration.md",
            worst.input_error or 0.0,
            worst.name,
            save,
        )
    log.info("quantised with %s on %d conversations: %s", policy, steps * loader.global_batch_size, saved)
    return saved
