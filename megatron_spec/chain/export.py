"""Checkpoint -> folders that engines load, checked by reading them back, with a serving configuration beside them."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron_spec import distributed, support
from megatron_spec.build import load_checkpoint
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.export.base import export_base
from megatron_spec.export.common import shared_folder
from megatron_spec.export.draft import export_draft
from megatron_spec.files import require_empty
from megatron_spec.pipeline.placement import check_parallel
from megatron_spec.serving.trtllm import write_trtllm_yaml

log = logging.getLogger(__name__)


def export(
    load: str, export_dir: str, *, extra_modules: bool = True, with_base: bool = False, base: str | None = None,
    max_draft_len: int = 3, bf16: bool = False, export_embeddings: bool = False, parallel: ParallelConfig | None = None,
) -> Path:  # fmt: skip
    """Write EXPORT_DIR/draft and, for a fake-quantised base or on request, EXPORT_DIR/base.

    Args:
        extra_modules: write the draft; without it the base alone.
        with_base: write the base also when it is not quantised.

    Raises:
        UserError: input that does not fit.
        VerificationError: what was written is not what is in memory; nothing is published.
    """
    parallel = parallel or ParallelConfig()
    folder = resolve(load)
    spec = read_spec(folder)
    quantised_base = spec.quant is not None and spec.quant.base != "none"
    if not extra_modules and not (quantised_base or with_base):
        raise UserError(
            "nothing to export: the base is not quantised and --export-extra-modules is not given; add "
            "--export-extra-modules for the draft or --export-base for the base"
        )
    if export_embeddings and spec.draft.algorithm == "medusa":
        raise UserError("--export-embeddings: a Medusa draft reads no embedding")
    require_empty(export_dir, "give another --export-dir, or remove it to export again")
    support.check("export", parallel)
    check_parallel(spec.base.config, parallel)
    world = distributed.initialize(parallel)
    loaded = load_checkpoint(folder, world, dtype=torch.bfloat16 if bf16 else torch.float32, base_path=base)
    out = Path(export_dir).resolve()
    run_config = {"checkpoint": str(folder), "quant": spec.quant.to_dict() if spec.quant else None}
    options = {"export_embeddings": True} if export_embeddings else {}
    with shared_folder(out, world, overwrite=False) as new:  # base and draft appear together or not at all
        if quantised_base or with_base:
            export_base(loaded.base, loaded.base_ref, new / "base", spec.quant, world, run_config=run_config)
        if extra_modules:
            export_draft(
                loaded.draft,
                loaded.base_ref,
                new / "draft",
                spec.quant,
                world,
                ends=loaded.base,
                run_config=run_config,
                **options,
            )
        if extra_modules and world.rank == 0 and spec.draft.algorithm.startswith("eagle3"):
            # the one kind of draft that its PyTorch backend loads
            write_trtllm_yaml(new / "trtllm.yaml", new / "draft", max_draft_len, place=out / "draft")
    if extra_modules and spec.draft.algorithm == "eagle-mtp":
        log.warning("no engine loads an MTP draft of this base: the folder is in a format of this package")
    log.info("exported %s", out)
    return out
