"""Choose the tokens that a draft can propose: the most frequent ones under the assistant mask.

V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.data.loader import ConversationDataset
from megatron_spec.data.tokenizer import beyond_vocabulary
from megatron_spec.drafts.vocab import DraftVocab


def count_supervised(dataset: ConversationDataset, vocab_size: int) -> Tensor:
    """int64 [V]: supervised occurrences of each token id. Raises UserError for an id outside the vocabulary."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for tokens, lines in dataset.supervised():
        wrong = np.flatnonzero(tokens >= vocab_size)
        if len(wrong):
            raise beyond_vocabulary(f"{dataset.path} line {lines[wrong[0]]}", int(tokens[wrong[0]]), vocab_size)
        counts_V += np.bincount(tokens, minlength=vocab_size)
    return torch.from_numpy(counts_V)


def turn_end_ids(dataset: ConversationDataset, special_ids: Collection[int]) -> list[int]:
    """Ascending ids among `special_ids` that an assistant turn of the data ends with."""
    ends: set[int] = set()
    for first, after in dataset.store.ranges():
        block = dataset.store.block(first, after)
        starts = np.repeat(np.cumsum(block.lengths) - block.lengths, block.run_counts)
        ends.update(np.unique(block.tokens[starts + block.runs[:, 1] - 1]).tolist())
    return sorted(ends & set(special_ids))


def coverage_curve(counts_V: Tensor, always: Collection[int] = ()) -> list[tuple[int, float]]:
    """(D, share of supervised tokens covered) for draft vocabularies from V/64 to V, about doubling each time."""
    vocab_size, smallest = len(counts_V), max(1, len(set(always)))
    sizes = {max(smallest, vocab_size * part // 64) for part in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)}
    inside = counts_V[_ranked(counts_V, always)].cumsum(0)
    total = max(int(counts_V.sum()), 1)
    return [(size, int(inside[size - 1]) / total) for size in sorted(sizes)]


def _ranked(counts_V: Tensor, always: Collection[int]) -> Tensor:
    """int64 [V] ids: `always`, then the rest by descending frequency; ties go to the lower id."""
    rank_V = counts_V.clone()
    rank_V[torch.tensor(sorted(always), dtype=torch.int64)] = torch.iinfo(torch.int64).max
    return torch.argsort(rank_V, descending=True, stable=True)


def select_draft_ids(counts_V: Tensor, draft_vocab_size: int, always: Collection[int] = ()) -> Tensor:
    """int64 [D] ascending: `always` (ids a turn can end with) and the most frequent others; ties go to the lower id.

    Raises UserError unless D is between 1 (or the number of `always`) and V.
    """
    vocab_size = len(counts_V)
    wrong = [i for i in always if not 0 <= i < vocab_size]
    if wrong:
        raise UserError(f"end-of-turn ids {wrong} are outside the vocabulary of {vocab_size} tokens")
    smallest = max(1, len(set(always)))
    if not smallest <= draft_vocab_size <= vocab_size:
        raise UserError(f"found draft vocabulary size {draft_vocab_size}, expected {smallest} to {vocab_size}")
    return _ranked(counts_V, always)[:draft_vocab_size].sort().values


def choose(counts_V: Tensor, draft_vocab_size: int, always: Collection[int] = ()) -> DraftVocab:
    """The draft vocabulary of `select_draft_ids`.

    Raises UserError if these are the first D ids of a larger vocabulary: serving engines take that for a missing map.
    """
    ids, vocab_size = select_draft_ids(counts_V, draft_vocab_size, always), len(counts_V)
    if draft_vocab_size < vocab_size and int(ids[-1]) == draft_vocab_size - 1:
        raise UserError(
            f"--draft-vocab-size {draft_vocab_size} selects the first {draft_vocab_size} of {vocab_size} ids, which "
            "serving engines take for a missing map: use a smaller size, or leave it out (the draft then has the "
            "base's vocabulary)"
        )
    return DraftVocab(ids, vocab_size)


def coverage(counts_V: Tensor, draft_ids_D: Tensor, always: Collection[int] = ()) -> dict[str, Any]:
    """Share of the supervised tokens that the draft can propose.

    `draft_tokens_never_seen` excludes `always`, which a smaller vocabulary would also contain.
    """
    total, inside = int(counts_V.sum()), int(counts_V[draft_ids_D].sum())
    return {
        "vocab_size": len(counts_V),
        "draft_vocab_size": len(draft_ids_D),
        "supervised_tokens": total,
        "covered_tokens": inside,
        "coverage": inside / max(total, 1),
        "distinct_tokens": int((counts_V > 0).sum()),
        "draft_tokens_never_seen": len(set(draft_ids_D[counts_V[draft_ids_D] == 0].tolist()) - set(always)),
    }
