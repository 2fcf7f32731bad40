"""Attach fp8 fake quantisers to base and draft, calibrate their ranges, save the quantised checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron_spec import distributed, presets
from megatron_spec.build import load_checkpoint, respec
from megatron_spec.chain.data import check_file, check_seq_length, open_dataset
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.config import ObjectiveConfig, ParallelConfig, QuantConfig, UserError, suggest
from megatron_spec.data.loader import BatchLoader, ConversationDataset
from megatron_spec.distributed import World
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.files import read_json, require_empty, write_json
from megatron_spec.pipeline.placement import check_parallel
from megatron_spec.quantization.attach import base_amax_state
from megatron_spec.quantization.calibrate import calibrate

log = logging.getLogger(__name__)

PRESETS = {
    "fp8": QuantConfig(),
    "fp8_draft_only": QuantConfig(base="none"),
    "fp8_base_only": QuantConfig(draft="none"),
}


def quant_policy(name: str, file: str | None = None) -> QuantConfig:
    """The preset of that name, with the fields that a JSON file gives.

    Raises UserError with a suggestion for an unknown preset or field, and for a policy that quantises nothing.
    """
    if name not in PRESETS:
        raise UserError(
            f"--export-quant-cfg {name!r} is not known{suggest(name, PRESETS)}; known: {', '.join(PRESETS)}"
        )
    if file is None:
        return PRESETS[name]
    changes = read_json(file)
    if not isinstance(changes, dict):
        raise UserError(f"--quant-config {file} must hold a JSON object")
    try:
        policy = QuantConfig.from_dict({**PRESETS[name].to_dict(), **changes})
    except UserError as e:
        raise UserError(f"--quant-config {file}: {e}") from None
    if policy.base == policy.draft == "none":
        raise UserError(f"--quant-config {file} with {name} quantises neither base nor draft: set one to 'fp8'")
    return policy


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
    load: str, save: str, data: str, *, preset: str = "fp8", quant_config: str | None = None, samples: int = 256,
    seq_length: int = 2048, micro_batch_size: int = 4, base: str | None = None, tokenizer: str | None = None,
    bf16: bool = False, objective: ObjectiveConfig | None = None, parallel: ParallelConfig | None = None,
) -> Path:  # fmt: skip
    """Quantise a checkpoint. Returns the iteration folder; calibration.json beside it lists every linear.

    Args:
        preset: name in `PRESETS`.
        quant_config: JSON file with fields of `QuantConfig` that replace those of the preset.

    Raises UserError for input that does not fit, before any weight is read where that is possible.
    """
    parallel, objective = parallel or ParallelConfig(), objective or ObjectiveConfig()
    quant = quant_policy(preset, quant_config)
    for flag, number in (("--calib-samples", samples), ("--micro-batch-size", micro_batch_size)):
        if number < 1:
            raise UserError(f"{flag} must be at least 1, found {number}")
    folder = resolve(load)
    spec = read_spec(folder)
    if spec.quant is not None:
        raise UserError(f"--load {load} is quantised already: quantise the checkpoint it was made from")
    objective = presets.objective_for(spec.draft, objective)
    check_file(data)
    require_empty(save, "give another --save folder, or remove it to quantise again")
    check_parallel(spec.base.config, parallel)
    check_seq_length(seq_length, spec)
    world = distributed.initialize(parallel)
    loaded = load_checkpoint(folder, world, dtype=torch.bfloat16 if bf16 else torch.float32, base_path=base)
    dataset = open_dataset(data, tokenizer or str(loaded.base_ref.path), seq_length)
    loader, steps = calibration_loader(dataset, world, samples, micro_batch_size, parallel.sequence_parallel)
    batches = [loader.step(i * loader.global_batch_size) for i in range(steps)]
    source = OnlineFeatures(loaded.base)
    report = calibrate(loaded.base, loaded.draft, source, batches, objective, quant, world)
    base_amax = base_amax_state(loaded.base) if quant.base != "none" else None
    saved = sharded.save(
        save, respec(loaded.spec, quant=quant, iteration=0), loaded.draft, loaded.vocab, world,
        base_amax=base_amax, run_config={"preset": preset, "samples": samples, "quant": quant.to_dict()},
    )  # fmt: skip
    if world.rank == 0:
        write_json(Path(save) / "calibration.json", [vars(line) for line in report])
    log.info("quantised with %s on %d conversations: %s", preset, steps * loader.global_batch_size, saved)
    return saved
