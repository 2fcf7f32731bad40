"""Which options belong to which decoding type, and the decoding type of a draft. No torch.

Options without effect are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_spec.config import (
    BlockConfig,
    DecodeConfig,
    DecodingType,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    UserError,
)
from megatron_spec.config.core import field_names

DECODING_TYPES: dict[str, DecodingType] = {
    "eagle1": "Eagle", "eagle3": "Eagle3", "eagle3.1": "Eagle3", "p-eagle": "Eagle3", "eagle-mtp": "MTP",
    "medusa": "Medusa", "dflash": "DFlash", "dspark": "DSpark",
}  # fmt: skip
"""Algorithm of a draft -> TensorRT-LLM's name for decoding with it."""

WITHOUT_DRAFT = ("NGram", "SA", "DraftTarget", "User")
"""Decoding types without a trained draft."""

_OWNERS: dict[str, tuple[str, ...]] = {
    "use_dynamic_tree": ("Eagle3", "Eagle", "MTP", "Medusa"),
    "dynamic_tree_max_topK": ("Eagle3", "Eagle", "MTP", "Medusa"),
    "max_total_draft_tokens": ("Eagle3", "Eagle", "MTP", "Medusa"),
    "medusa_choices": ("Medusa",),
    "max_matching_ngram_size": ("NGram", "SA"),
    "sa_threshold": ("Eagle3", "Eagle", "MTP", "Medusa", "DFlash", "DSpark", "DraftTarget"),
    "is_keep_all": ("NGram",),
    "is_use_oldest": ("NGram",),
    "is_public_pool": ("NGram",),
    "drafter": ("User",),
    "speculative_model": ("Eagle3", "Eagle", "MTP", "Medusa", "DFlash", "DSpark", "DraftTarget"),
    "use_rejection_sampling": ("Eagle3", "Eagle", "MTP", "Medusa", "DFlash", "DSpark", "DraftTarget"),
    "confidence_threshold": ("DSpark",),
}


_UNDRAFTED = (
    "decoding_type", "max_new_tokens", "batch_size", "cuda_graphs", "temperature", "top_k", "top_p", "seed",
)  # fmt: skip
"""Options of decoding without a drafter."""


def check_undrafted(config: DecodeConfig) -> None:
    """Raise UserError for drafting options if there is no drafter."""
    for name in field_names(DecodeConfig):
        if name not in _UNDRAFTED and config.sets(name):
            raise UserError(
                f"--{name.replace('_', '-')} needs a draft, but none is given: leave it out, or give --load, "
                "--speculative-model or --decoding-type"
            )


def check_options(config: DecodeConfig, kind: DecodingType) -> None:
    """Raise UserError for options of another decoding type and for conflicting options."""
    for name, owners in _OWNERS.items():
        if config.sets(name) and kind not in owners:
            raise UserError(
                f"--{name.replace('_', '-')} is an option of {', '.join(owners)}, not of {kind}: leave it out"
            )
    for name in ("dynamic_tree_max_topK", "max_total_draft_tokens"):
        if config.sets(name) and not config.use_dynamic_tree:
            raise UserError(
                f"--{name.replace('_', '-')} shapes the dynamic tree: give --use-dynamic-tree, or leave it out"
            )
    if not config.is_use_oldest and not config.is_keep_all:
        raise UserError(
            "--no-is-use-oldest does nothing with --no-is-keep-all: only the first continuation is kept; leave it out"
        )
    trees = [n for n in ("use_dynamic_tree", "medusa_choices") if getattr(config, n)]
    if len(trees) == 2:
        raise UserError("found --use-dynamic-tree and --medusa-choices, expected one tree")
    if config.sa_threshold is not None and trees:
        raise UserError("--sa-threshold replaces the tokens of a chain: leave the tree out, or --sa-threshold")
    if trees and config.use_rejection_sampling:
        raise UserError("--use-rejection-sampling drafts a chain: leave the tree out")
    if kind == "User" and config.drafter is None:
        raise UserError("--decoding-type User needs --drafter module:Class")
    if kind == "DraftTarget" and config.speculative_model is None:
        raise UserError("--decoding-type DraftTarget needs --speculative-model, the folder of the smaller model")
    if config.medusa_choices is not None:
        read_choices(config.medusa_choices)
    _check_acceptance(config)


def check_confidence(config: DecodeConfig, draft: DraftConfig | None) -> None:
    """Raise UserError for a threshold of confidences that the draft does not predict."""
    if config.confidence_threshold > 0 and isinstance(draft, BlockConfig) and not draft.has_confidence_head:
        raise UserError(
            f"--confidence-threshold {config.confidence_threshold}, but the draft has no confidence head: leave it out"
        )


def default_length(
    config: DecodeConfig, draft: DraftConfig | None, trained: int | None = None, positions: int | None = None
) -> int:
    """Draft length where none is given: that of `DecodeConfig`, or the longest that `check_lengths` allows."""
    limits = [DecodeConfig().max_draft_len, positions]
    if isinstance(draft, BlockConfig):
        limits.append(draft.num_steps)
    if isinstance(draft, EagleConfig) and draft.parallel_drafting:
        limits.append(trained)
    if isinstance(draft, MedusaConfig):
        limits.append(_tree_depth(config) or draft.num_heads)
    if config.use_dynamic_tree:
        limits.append(config.max_total_draft_tokens)
    return min(limit for limit in limits if limit is not None)


def check_lengths(
    config: DecodeConfig, lens: Sequence[int], draft: DraftConfig | None, trained: int | None = None,
    flag: str = "--max-draft-len", positions: int | None = None,
) -> None:  # fmt: skip
    """Raise UserError for draft lengths and trees that are impossible.

    Args:
        lens: draft lengths; for a tree, its levels.
        draft: configuration of the trained draft, if there is one.
        trained: steps it was trained for (--ttt-steps), if known.
        flag: where the lengths were given.
        positions: of the base, if known.
    """
    deepest = max(lens)
    if isinstance(draft, BlockConfig) and deepest > draft.num_steps:
        raise UserError(
            f"{flag} {deepest}, but the draft proposes blocks of {draft.num_steps} tokens: give at most "
            f"{draft.num_steps}"
        )
    if positions is not None and deepest > positions:
        raise UserError(f"{flag} {deepest}, but the base has {positions} positions: give fewer")
    if isinstance(draft, EagleConfig) and draft.parallel_drafting and min(lens) < 1:
        raise UserError(f"{flag} {min(lens)}: a p-eagle draft proposes at least one token")
    if isinstance(draft, EagleConfig) and draft.parallel_drafting and trained is not None and deepest > trained:
        raise UserError(
            f"{flag} {deepest}: this p-eagle draft proposes {trained} tokens at once, as it was trained "
            f"(--ttt-steps {trained}); give at most {trained}, or train it for more"
        )
    if config.use_dynamic_tree and isinstance(draft, EagleConfig) and draft.parallel_drafting:
        raise UserError(
            "--use-dynamic-tree: p-eagle proposes a chain in one forward, so it cannot grow a tree: leave it out"
        )
    if config.use_dynamic_tree and deepest > config.max_total_draft_tokens:
        raise UserError(
            f"{flag} {deepest} with --max-total-draft-tokens {config.max_total_draft_tokens}: a tree has at "
            "least one node on each level, so give at most as many levels as nodes"
        )
    if config.use_dynamic_tree and draft is not None and config.dynamic_tree_max_topK > draft.draft_vocab_size:
        raise UserError(
            f"--dynamic-tree-max-topK {config.dynamic_tree_max_topK}: the draft has {draft.draft_vocab_size} tokens"
        )
    if not isinstance(draft, MedusaConfig):
        return
    paths = read_choices(config.medusa_choices) if config.medusa_choices else ()
    depth, rank = max(map(len, paths), default=0), max((max(p) for p in paths), default=0)
    if depth > draft.num_heads or rank >= draft.vocab_size:
        raise UserError(
            f"--medusa-choices: found a path of {depth} tokens and rank {rank}, but the draft has {draft.num_heads} "
            f"heads and ranks up to {draft.vocab_size - 1}"
        )
    if depth > deepest:
        raise UserError(
            f"--medusa-choices: found a path of {depth} tokens, but at most {deepest} are drafted: give {flag} {depth}"
        )
    if deepest > draft.num_heads and not paths:
        raise UserError(f"{flag} {deepest}: the draft has {draft.num_heads} Medusa heads, a token each")


def _tree_depth(config: DecodeConfig) -> int:
    """Depth of a fixed tree; 0 without one."""
    return max(map(len, read_choices(config.medusa_choices))) if config.medusa_choices else 0


def check_tree_depth(config: DecodeConfig, deepest: int) -> None:
    """Raise UserError for a draft length beyond the depth of a fixed tree."""
    depth = _tree_depth(config)
    if depth and deepest > depth:
        raise UserError(
            f"--max-draft-len {deepest}: the longest path of --medusa-choices has {depth} tokens: give at most {depth}"
        )


def _check_acceptance(config: DecodeConfig) -> None:
    relaxed = config.use_relaxed_acceptance_for_thinking
    ways = ("use_rejection_sampling", "typical_acceptance", "use_relaxed_acceptance_for_thinking")
    chosen = [f"--{n.replace('_', '-')}" for n in ways if getattr(config, n)]
    if len(chosen) > 1:
        raise UserError(f"found {' and '.join(chosen)}, expected one acceptance rule")
    if relaxed and config.temperature > 0:
        raise UserError(f"--use-relaxed-acceptance-for-thinking is for temperature 0, found {config.temperature}")
    for name in ("top_k", "top_p") if config.typical_acceptance else ():
        if config.sets(name):
            raise UserError(
                f"--{name.replace('_', '-')}: --typical-acceptance accepts tokens outside of it: leave it out"
            )
    for names, owner in (
        (("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token"), ways[2]),
        (("posterior_threshold", "posterior_alpha"), ways[1]),
    ):
        for name in names:
            if config.sets(name) and not getattr(config, owner):
                raise UserError(f"--{name.replace('_', '-')} does nothing without --{owner.replace('_', '-')}")
    if relaxed and None in (config.begin_thinking_phase_token, config.end_thinking_phase_token):
        raise UserError(
            "--use-relaxed-acceptance-for-thinking: the tokenizer has no <think> and </think>; give "
            "--begin-thinking-phase-token and --end-thinking-phase-token"
        )
    if relaxed and (config.relaxed_topk == 1 or not config.sets("relaxed_delta")):
        raise UserError(
            "--use-relaxed-acceptance-for-thinking accepts the base's best token alone with --relaxed-topk "
            f"{config.relaxed_topk} and --relaxed-delta {config.relaxed_delta:g}: give more than 1 and more than 0"
        )


def decoding_type(algorithm: str | None, asked: DecodingType | None) -> DecodingType:
    """The decoding type for a draft of `algorithm` (None: no draft) and the user's choice `asked`.

    Raises UserError if they conflict.
    """
    if asked in WITHOUT_DRAFT:
        return asked  # type: ignore[return-value]
    if algorithm is None and asked == "MTP":
        raise UserError(
            "--decoding-type MTP needs a checkpoint of a prediction module: for the one that the base ships run "
            "convert_model.py --load BASE --export-eagle-algorithm eagle-mtp --mtp-from-base --save DIR, then give "
            "--load DIR"
        )
    if algorithm is None:
        raise UserError(
            f"--decoding-type {asked or 'Eagle3, Eagle, Medusa or MTP'} needs a draft: give --load (a checkpoint) or "
            f"--speculative-model (an exported folder); without a draft there are {', '.join(WITHOUT_DRAFT)}"
        )
    found = DECODING_TYPES[algorithm]
    if asked == "Eagle" and found == "Eagle3":
        return found  # as TensorRT-LLM spells EAGLE-3 up to release 1.2
    if asked not in (None, found):
        raise UserError(f"--decoding-type {asked}, but the draft is {algorithm}, which decodes as {found}")
    return found


def read_choices(text: str) -> tuple[tuple[int, ...], ...]:
    """The paths of a fixed tree: a JSON list of lists of ranks, or a file that holds one.

    Path (r0, r1, ...) is the token of rank r0 of the first head, then of rank r1 of the second, ... Raises UserError
    for anything else, for duplicate paths, and for a path whose prefix is missing.
    """
    try:
        found: Any = json.loads(text if text.lstrip().startswith("[") else Path(text).read_text(encoding="utf-8"))
        paths = tuple(tuple(path) for path in found)
    except (OSError, ValueError, TypeError) as e:
        raise UserError(
            f"--medusa-choices {text[:60]!r}: expected a JSON list of paths or a file of it ({e})"
        ) from None
    wrong = [p for p in paths if not p or not all(type(r) is int and r >= 0 for r in p)]
    wrong += [p for p in paths if len(p) > 1 and p[:-1] not in paths]
    if wrong or not paths or len(set(paths)) < len(paths):
        raise UserError(
            f"--medusa-choices: found {[list(p) for p in wrong[:3]] or 'no path, or a duplicate'}, expected distinct "
            "paths of ranks from 0, the prefix of each path included: [[0], [1], [0, 0]]"
        )
    return tuple(sorted(paths, key=lambda p: (len(p), p)))
