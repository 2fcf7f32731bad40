"""Bases and drafts with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_spec.base.model import FrozenBase, default_paths
from megatron_spec.base.moe import Router
from megatron_spec.config import LOCAL, BaseConfig, BaseLayers, presets
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.runtime.distributed import World


def random_base(
    config: BaseConfig, world: World, dtype: torch.dtype, layers: BaseLayers = LOCAL, without: Sequence[str] = ()
) -> FrozenBase:
    """A base with random weights and the captures of an EAGLE-3 draft, without these fast paths."""
    captures = presets.default_capture_ids(config.num_layers)
    paths = default_paths(config, world, dtype, layers).without(*without)
    base = FrozenBase.build(config, world, captures, dtype, layers=layers, paths=paths)
    _randomise(base)
    return base


def random_draft(
    base: BaseConfig, world: World, draft_vocab_size: int, dtype: torch.dtype, without: Sequence[str] = ()
) -> Any:
    """An EAGLE-3 draft for a base, without these fast paths; its vocabulary is spread evenly over the base's."""
    size = min(draft_vocab_size, base.vocab_size)
    config = presets.eagle_config(base, overrides={"draft_vocab_size": size})
    vocab = DraftVocab(torch.arange(size) * (base.vocab_size // size), base.vocab_size)
    draft = build_draft(config, vocab, world, dtype)
    draft.paths = draft.paths.without(*without)
    _randomise(draft)
    return draft


def random_block_draft(
    base: BaseConfig, world: World, algorithm: str, layers: int, block_size: int, dtype: torch.dtype
) -> torch.nn.Module:
    """A DFlash or DSpark draft of a base; its mask token is the last of the vocabulary."""
    fields = {"mask_token_id": base.vocab_size - 1, "num_hidden_layers": layers, "block_size": block_size}
    config = presets.block_config(base, algorithm, fields)
    draft = build_draft(config, DraftVocab.full(base.vocab_size), world, dtype)
    _randomise(draft)
    return draft


@torch.no_grad()
def _randomise(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
    for number, router in enumerate(m for m in module.modules() if isinstance(m, Router)):
        # ranks that share experts choose alike, whatever torch's seed on each of them
        router.weight.normal_(0.0, 0.02, generator=torch.Generator(router.weight.device).manual_seed(number))
