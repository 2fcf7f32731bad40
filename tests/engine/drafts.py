"""Drafts that engines can be tried with: trained for a minute on the base's own greedy text, then exported.

S sequence, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_spec.base.model import FrozenBase
from megatron_spec.batch import Batch, Features
from megatron_spec.checkpoint.base_import import BaseReference, inspect_base, load_base
from megatron_spec.config import DecodeConfig, ObjectiveConfig
from megatron_spec.config.presets import block_config, default_capture_ids, eagle_config, medusa_config, objective_for
from megatron_spec.decoding.engine import decode
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.contract import Draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.evaluation.acceptance import AcceptanceStats, acceptance_stats
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World

K = 3
"""Tokens drafted per step."""
BLOCKS = {"dflash": K + 1, "dspark": K}
"""Block drafts that propose so many, and the size of their blocks."""


@dataclass
class Setting:
    """A base, its greedy answers, and the batch made of them."""

    world: World
    reference: BaseReference
    base: FrozenBase
    prompts: list[list[int]]
    answers: list[list[int]]
    batch: Batch


def setting(
    folder: Path, prompts: list[list[int]], tokens: int, kind: str, captures: Sequence[int] | None = None
) -> Setting:
    """Answer prompts of one length with the base, `tokens` tokens each; it captures what a draft of `kind` reads."""
    world = distributed.initialize()
    reference = inspect_base(folder)
    if captures is None:
        captures = default_capture_ids(reference.config.num_layers) if kind.startswith("eagle3") else ()
    return answered(world, reference, load_base(reference, world, tuple(captures)), prompts, tokens)


def answered(
    world: World, reference: BaseReference, base: FrozenBase, prompts: list[list[int]], tokens: int
) -> Setting:
    """The setting of a base as it is now: quantised, for example."""
    config = DecodeConfig(max_draft_len=0, max_new_tokens=tokens)
    answers = [g.tokens for g in decode(base, prompts, config, ())]
    ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)], device=world.device)
    turns = torch.zeros_like(ids, dtype=torch.int32)
    turns[:, len(prompts[0]) :] = 1
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return Setting(world, reference, base, prompts, answers, Batch(ids, positions, turns, torch.zeros_like(turns)))


def train(made: Setting, kind: str, steps: int, lr: float, **overrides: Any) -> Draft:
    """A draft of that kind that has learned the answers, more or less."""
    config = made.reference.config
    vocab = DraftVocab.full(config.vocab_size)
    if kind == "medusa":
        shape: Any = medusa_config(config, num_heads=K)
    elif kind == "eagle1":
        shape = eagle_config(config, kind)
    elif kind in BLOCKS:
        shape = block_config(config, kind, {"block_size": BLOCKS[kind], **overrides})
    elif "draft_vocab_size" in overrides:
        shape = eagle_config(config, kind, overrides=overrides)
    else:
        used = torch.unique(torch.cat([made.batch.tokens_BS.flatten().cpu(), torch.arange(100, 140)]))
        vocab = DraftVocab(used, config.vocab_size)
        shape = eagle_config(config, kind, overrides={"draft_vocab_size": len(used), **overrides})
    draft = build_draft(shape, vocab, made.world, torch.float32)
    draft.initialize(made.base, seed=0)
    train_on(made, draft, steps, lr)
    return draft


def train_on(made: Setting, draft: Draft, steps: int, lr: float) -> None:
    """Further steps of a draft, fake-quantised or not."""
    objective = objective_for(draft.config, ObjectiveConfig(ttt_steps=K))  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(draft.parameters(), lr=lr)
    (features,) = OnlineFeatures(made.base).features([made.batch])
    for _ in range(steps):
        losses = draft(features, made.base, objective)
        (losses.total / losses.rows_T[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(made: Setting, draft: Draft, tokens: int) -> tuple[list[list[int]], AcceptanceStats]:
    """Text and acceptance as this package's own engine finds them."""
    config = DecodeConfig(max_draft_len=K, max_new_tokens=tokens)
    found = decode(made.base, made.prompts, config, (), draft=draft)
    return [g.tokens for g in found], acceptance_stats(found)


def _read_prompts(made: Setting) -> tuple[Tensor, Features]:
    """The prompts [B, S], and the base's features of them."""
    prompts = torch.tensor(made.prompts, device=made.world.device)
    zeros = torch.zeros_like(prompts, dtype=torch.int32)
    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    batch = Batch(prompts, positions, zeros, zeros)
    (features,) = OnlineFeatures(made.base).features([batch])
    return prompts, features


@torch.no_grad()
def base_logprobs(made: Setting) -> Tensor:
    """[B, V] of the token after each prompt, by the base."""
    _, features = _read_prompts(made)
    return made.base.logits(features.state_SBH)[-1].float().log_softmax(-1).cpu()


@torch.no_grad()
def first_logits(made: Setting, draft: Draft) -> Tensor:
    """[B, V] what the draft says first after each prompt, on the CPU: its logits, -inf outside its vocabulary."""
    from megatron_spec.export.verify import two_steps

    if draft.config.algorithm in BLOCKS:  # type: ignore[union-attr]
        return _first_of_block(made, draft)
    prompts, features = _read_prompts(made)
    batch = features.batch
    chosen = torch.tensor([a[0] for a in made.answers], device=prompts.device)
    following = torch.cat([prompts[:, 1:], chosen[:, None]], 1)
    logits, _ = two_steps(
        draft, features.captures_SBC, made.base.embed(following), batch.positions_BS, features.state_SBH, made.base
    )
    vocab: Any = draft.vocab
    whole = torch.full((len(prompts), vocab.vocab_size), -torch.inf)
    whole[:, vocab.target_ids.cpu()] = logits[-1][:, : len(vocab)].cpu()
    return whole


def _first_of_block(made: Setting, draft: Any) -> Tensor:
    """[B, V] logits of the first slot that proposes, of blocks whose anchors are the first tokens of the answers."""
    from megatron_spec.drafts.anchors import BlockPlan

    seen = slice(0, len(made.prompts[0]) + 2)  # the second token of an answer is what the slot is asked for
    whole = made.batch
    batch = Batch(*(x[:, seen] for x in (whole.tokens_BS, whole.positions_BS, whole.turns_BS, whole.documents_BS)))
    (features,) = OnlineFeatures(made.base).features([batch])
    plan = BlockPlan.of(batch, draft.config, 1)
    states_BCH = draft.states(features, plan, made.base).unflatten(0, (len(made.prompts), -1))
    logits_BV: Tensor = draft.logits(states_BCH[None, :, draft.config.first_slot], made.base)[0]
    if draft.config.algorithm == "dspark":
        m = draft.markov(plan.tokens_P)
        logits_BV = logits_BV + draft.markov_logits(draft.markov_head.step(m, states_BCH[:, 0], m)[0])
    return logits_BV[:, : made.base.config.vocab_size].cpu()
