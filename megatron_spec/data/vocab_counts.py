"""Which target tokens a draft should be able to say: the most frequent ones under the assistant mask.

V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.data.loader import Dataset


def count_supervised(dataset: Dataset, vocab_size: int) -> Tensor:
    """int64 [V]: how often each token id is supervised. Raises UserError for an id outside the vocabulary."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for i in range(len(dataset)):
        sample = dataset[i]
        tokens = sample.tokens[sample.turns > 0]
        if int(tokens.max()) >= vocab_size:
            raise UserError(
                f"{sample.where}: found token id {int(tokens.max())}, the base knows ids below {vocab_size}: "
                "tokenizer and base do not belong together"
            )
        counts_V += torch.bincount(tokens, minlength=vocab_size)
    return counts_V


def select_draft_ids(counts_V: Tensor, draft_vocab_size: int, always: Collection[int] = ()) -> Tensor:
    """int64 [D] ascending: `always` (ids a turn can end with) and the most frequent others; ties go to the lower id.

    Raises UserError when D does not lie between 1 (or the number of `always`) and V.
    """
    vocab_size = len(counts_V)
    wrong = [i for i in always if not 0 <= i < vocab_size]
    if wrong:
        raise UserError(f"end-of-turn ids {wrong} are outside the vocabulary of {vocab_size} tokens")
    smallest = max(1, len(set(always)))
    if not smallest <= draft_vocab_size <= vocab_size:
        raise UserError(f"found draft vocabulary size {draft_vocab_size}, expected {smallest} to {vocab_size}")
    rank_V = counts_V.clone()
    rank_V[torch.tensor(sorted(always), dtype=torch.int64)] = torch.iinfo(torch.int64).max
    return torch.argsort(rank_V, descending=True, stable=True)[:draft_vocab_size].sort().values


def coverage(counts_V: Tensor, draft_ids_D: Tensor) -> dict[str, Any]:
    """What share of the supervised tokens the draft can say."""
    total, inside = int(counts_V.sum()), int(counts_V[draft_ids_D].sum())
    return {
        "vocab_size": len(counts_V),
        "draft_vocab_size": len(draft_ids_D),
        "supervised_tokens": total,
        "covered_tokens": inside,
        "coverage": inside / max(total, 1),
        "distinct_tokens": int((counts_V > 0).sum()),
        "draft_tokens_never_seen": int((counts_V[draft_ids_D] == 0).sum()),
    }
