"""A tiny base with a tiny draft, and batches for them, on the current world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase
from megatron_spec.batch import Batch
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base
from megatron_spec.config import EagleConfig, ObjectiveConfig, ParallelConfig
from megatron_spec.config.presets import eagle_config
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.eagle3 import EagleDraft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World

OBJECTIVE = ObjectiveConfig(ttt_steps=3)
V, D = 83, 40


@dataclass
class Tiny:
    """One rank's share of everything."""

    world: World
    reference: BaseReference
    base: FrozenBase
    draft: EagleDraft
    source: OnlineFeatures
    batches: list[list[Batch]]


def world_of(**parallel: Any) -> World:
    """Process groups for a layout; several layouts may follow one another in one process."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return distributed.initialize(ParallelConfig(**parallel))


def batch(seed: int, size: int = 2, length: int = 12) -> Batch:
    """Random tokens of one document per row, the last two thirds supervised."""
    tokens = torch.randint(V, (size, length), generator=torch.Generator().manual_seed(seed))
    turns = torch.zeros(size, length, dtype=torch.int32)
    turns[:, length // 3 :] = 1
    positions = torch.arange(length).expand(size, length)
    return Batch(tokens, positions, turns, torch.zeros(size, length, dtype=torch.int32))


def vocabulary(size: int = D) -> DraftVocab:
    """`size` of the V tokens, not the first ones."""
    if size == V:
        return DraftVocab.full(V)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:size]
    return DraftVocab(ids.sort().values, V)


def draft_config(reference: BaseReference, size: int = D, **overrides: Any) -> EagleConfig:
    """A draft with a reduced vocabulary and small first features, so that fed-back ones widen the ranges."""
    first = {} if "hidden_size" in overrides else {"fc_init": "average"}
    return eagle_config(reference.config, overrides={"draft_vocab_size": size, **first, **overrides})


def make(folder: str | Path, world: World, size: int = D, dtype: torch.dtype = torch.float32, **overrides: Any) -> Tiny:
    """Base from `folder`, a new draft (random norms, so that a lost norm is detected), two steps of data."""
    reference = inspect_base(folder)
    config = draft_config(reference, size, **overrides)
    base = load_base(reference, world, config.capture_layer_ids, dtype)
    draft = build_draft(config, vocabulary(size), world, dtype)
    draft.initialize(base, seed=5)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()))
            elif "fc" not in name and "lm_head" not in name:
                parameter.mul_(4.0)  # init_std 0.02 would make a tiny draft close to linear
    batches = [[batch(10 * step + i) for i in range(world.pp_size)] for step in range(2)]
    return Tiny(world, reference, base, draft, OnlineFeatures(base), batches)
