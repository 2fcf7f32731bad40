"""Answers that stay in the text of a conversation but are not trained on (`conversations.is_trained`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_spec.config import UserError
from megatron_spec.data.conversations import Conversation, is_trained

if TYPE_CHECKING:
    from megatron_spec.data.chat import Sample


def masked(conversation: Conversation, sample: Sample) -> Sample:
    """The sample of a conversation's text without supervision of the answers that are not trained on.

    Raises UserError if they cannot be told apart, or if no supervised token is left.
    """
    trained = [is_trained(message) for message in conversation.messages if message["role"] == "assistant"]
    if all(trained):
        return sample
    turns_N = sample.turns.numpy()
    if (count := int(turns_N.max(initial=0))) != len(trained):
        raise UserError(
            f"{conversation.where}: {len(trained)} answers, some with weight 0, but the chat template marks {count} "
            "turns: end the conversation before those answers, or remove the key"
        )
    kept_N = np.array([False, *trained])[turns_N]
    if not kept_N.any():
        raise UserError(f"{conversation.where}: no token of an answer that is trained on is left: remove the line")
    return replace(sample, turns=torch.from_numpy(np.where(kept_N, turns_N, 0).astype(np.int32)))
