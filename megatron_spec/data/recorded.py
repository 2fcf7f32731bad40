"""What generate.py recorded with a line, found again in the tokens of its samples: ids of answers, rejections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_spec.config import UserError
from megatron_spec.data.conversations import Conversation


def check_tokenizer(conversation: Conversation, vocabulary_hash: str) -> None:
    """Raise UserError if a record belongs to another tokenizer."""
    for name, record in (("answer_ids", conversation.answer_ids), ("rejected", conversation.rejected)):
        if record is not None and record.tokenizer != vocabulary_hash:
            raise UserError(
                f"{conversation.where}: {name} belong to another tokenizer ({record.tokenizer}, this one is "
                f"{vocabulary_hash}): answer the prompts with this base, or remove the key to train on the text"
            )


def indices_of(conversation: Conversation) -> Sequence[list[int] | None]:
    """Rejections of each answer, as indices in its tokens; None without a record."""
    answers = sum(message["role"] == "assistant" for message in conversation.messages)
    return [None] * answers if conversation.rejected is None else conversation.rejected.turns


def placed(conversation: Conversation, indices: Sequence[int] | None, answer: Sequence[int]) -> list[int]:
    """Indices in a sample of some tokens of an answer, given the indices of all of them. Raises UserError."""
    wanted = sorted(set(indices or ()))
    if wanted and wanted[-1] >= len(answer):
        raise UserError(
            f"{conversation.where}: rejected names token {wanted[-1]} of an answer of {len(answer)}: the line was "
            "written with another template; answer the prompts with this base, or remove the key"
        )
    return [answer[i] for i in wanted]


def in_turns(conversation: Conversation, turns_N: NDArray[Any]) -> list[int]:
    """Indices in the sample of a conversation's text of its rejections. Raises UserError if they do not fit.

    Args:
        turns_N: see `Sample`.
    """
    answers, found = indices_of(conversation), []
    if (count := int(turns_N.max(initial=0))) != len(answers):
        raise UserError(
            f"{conversation.where}: rejected is given for {len(answers)} answers, the chat template marks {count}: "
            "remove the key"
        )
    for turn, indices in enumerate(answers, start=1):
        found += placed(conversation, indices, np.flatnonzero(turns_N == turn).tolist())
    return found
