"""Base checkpoint -> draft checkpoint: a fresh draft whose every parameter is set, beside a link to its base."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from megatron_spec import distributed, presets
from megatron_spec.build import link
from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base
from megatron_spec.checkpoint.spec import CheckpointSpec
from megatron_spec.config import EagleConfig, ParallelConfig, UserError
from megatron_spec.distributed import World
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.base import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.files import read_json, require_empty
from megatron_spec.pipeline.last_layer import last_layer_tensors
from megatron_spec.pipeline.model import FrozenBase
from megatron_spec.pipeline.placement import check_parallel

log = logging.getLogger(__name__)


def draft_vocabulary(path: str | None, overrides: dict[str, Any], vocab_size: int) -> DraftVocab:
    """The vocabulary of a new draft: calibrated when `path` is given, else the whole one.

    Raises UserError when a reduced size is asked for without a calibrated vocabulary, or sizes contradict.
    """
    wanted = overrides.get("draft_vocab_size")
    if path is None:
        if wanted not in (None, vocab_size):
            raise UserError(
                f"draft_vocab_size is {wanted}, but no calibrated vocabulary was given: run "
                "tools/calibrate_draft_vocab.py on the training conversations and pass --draft-vocab"
            )
        return DraftVocab.full(vocab_size)
    file = Path(path)
    vocab = DraftVocab.load(file / "draft_vocab.safetensors" if file.is_dir() else file)
    if vocab.vocab_size != vocab_size:
        raise UserError(f"{path} was made for a vocabulary of {vocab.vocab_size} tokens, the base has {vocab_size}")
    if wanted not in (None, len(vocab)):
        raise UserError(f"--eagle-config says draft_vocab_size {wanted}, {path} holds {len(vocab)} tokens")
    return vocab


def plan(
    ref: BaseReference, eagle_algorithm: str, eagle_config: str | None, draft_vocab: str | None
) -> tuple[EagleConfig, DraftVocab]:
    """Architecture and vocabulary of the draft, checked before any weight is read."""
    overrides = read_json(eagle_config) if eagle_config else {}
    if not isinstance(overrides, dict):
        raise UserError(f"{eagle_config} must hold a JSON object")
    vocab = draft_vocabulary(draft_vocab, overrides, ref.config.vocab_size)
    config = presets.eagle_config(ref.config, eagle_algorithm, {**overrides, "draft_vocab_size": len(vocab)})
    return config, vocab


def new_draft(
    base: FrozenBase, config: EagleConfig, vocab: DraftVocab, world: World, dtype: torch.dtype, seed: int
) -> Draft:
    """A draft initialised from the base; the values do not depend on the parallel layout."""
    draft = build_draft(config, vocab, world, dtype)
    draft.initialize(base, last_layer_tensors(base), seed)
    return draft


def convert(
    load: str, save: str, *, eagle_algorithm: str = "eagle3", eagle_config: str | None = None,
    draft_vocab: str | None = None, parallel: ParallelConfig | None = None, bf16: bool = False, seed: int = 1234,
) -> Path:  # fmt: skip
    """Give a base (Hugging Face folder or Megatron checkpoint) a new draft and save it. Returns the iteration folder.

    Raises UserError for bases, configurations and layouts that do not fit, before any weight is read.
    """
    parallel = parallel or ParallelConfig()
    require_empty(save, "give another --save folder, or remove it to convert again")
    ref = inspect_base(load)
    config, vocab = plan(ref, eagle_algorithm, eagle_config, draft_vocab)
    check_parallel(ref.config, parallel)
    check_draft_parallel(config, parallel)
    world = distributed.initialize(parallel, seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    base = load_base(ref, world, capture_layer_ids=config.capture_layer_ids, dtype=dtype)
    draft = new_draft(base, config, vocab, world, dtype, seed)
    spec = CheckpointSpec(base=link(ref), draft=config)
    folder = sharded.save(save, spec, draft, vocab, world, run_config={"seed": seed, "bf16": bf16})
    parameters = sum(p.numel() for p in draft.parameters()) * 1e-6
    log.info("draft %s, %.1f M parameters on this rank, D = %d: %s", config.algorithm, parameters, len(vocab), folder)
    return folder


def check_draft_parallel(config: EagleConfig, parallel: ParallelConfig) -> None:
    """Raise UserError when tensor parallelism does not divide the draft's shapes."""
    tp = parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "intermediate_size", "draft_vocab_size"):
        if getattr(config, name) % tp:
            raise UserError(
                f"--tensor-model-parallel-size {tp} does not divide the draft's {name} {getattr(config, name)}: "
                "choose another size or change it in --eagle-config"
            )
