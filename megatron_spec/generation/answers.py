"""Answers of a base as chat messages, and as training lines that reproduce the generated tokens.

Text is not always enough: a chat template trims it, removes reasoning or wraps it in channels, text may tokenise to
different tokens than those generated, and an answer cut at the token limit has no end. So a line is tokenised as in
training, and keeps the generated ids (`answer_ids`) when this does not reproduce the dialogue's prompts and answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder, Sample
from megatron_spec.data.conversations import Conversation
from megatron_spec.data.tokenizer import special_ids

Message = dict[str, Any]

_CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|channel\|>|$)",
    re.DOTALL,
)
"""A channel of gpt-oss (thinking, tool call or answer): its name and its text."""


def answer_message(tokens: Sequence[int], tokenizer: Any) -> Message | None:
    """The assistant's message for an answer (without its stop token); None for an empty answer.

    Channels (gpt-oss: analysis, commentary, final) become `reasoning_content` and `content`; other special tokens are
    left out of the text.
    """
    body = list(tokens)
    special = special_ids(tokenizer)
    if any(token in special for token in body):
        whole = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if found := _CHANNEL.findall(whole):
            content = "".join(text for name, text in found if name == "final")
            thought = "\n".join(text for name, text in found if name != "final" and text.strip())
            message = {"role": "assistant", "content": content}
            if thought:
                message["reasoning_content"] = thought
            return message if content.strip() or thought else None
    text = tokenizer.decode(body, skip_special_tokens=True)
    return {"role": "assistant", "content": text} if text.strip() else None


def trains_back(samples: Sequence[Sample], asked: Sequence[list[int]], answers: Sequence[list[int]]) -> bool:
    """True if the only sample contains each prompt followed by its answer, and supervises only the answers."""
    if len(samples) != 1:
        return False
    tokens, turns = samples[0].tokens.tolist(), samples[0].turns.tolist()
    for prompt, answer in zip(asked, answers, strict=True):
        begin, end = len(prompt), len(prompt) + len(answer)
        if tokens[:end] != prompt + answer or not all(turns[begin:end]):
            return False
    return sum(turn > 0 for turn in turns) == sum(map(len, answers))


class Answered(NamedTuple):
    """A conversation with generated answers.

    Attributes:
        conversation: its messages, the answers included.
        prompts: text of the prompt of each answer.
        asked: token ids of the prompt of each answer.
        answers: token ids of each answer, including the stop token.
    """

    conversation: Conversation
    prompts: Sequence[str]
    asked: Sequence[list[int]]
    answers: Sequence[list[int]]


def answer_ids(encoder: ChatEncoder, lines: Sequence[Answered]) -> list[dict[str, Any] | None]:
    """The `answer_ids` that each line needs besides its text; None when tokenising the text reproduces the answers."""
    return [
        None if trains_back(samples, line.asked, line.answers) else _kept_ids(encoder, line)
        for line, samples in zip(lines, _samples(encoder, lines), strict=True)
    ]


def _samples(encoder: ChatEncoder, lines: Sequence[Answered]) -> list[list[Sample]]:
    """What each line gives in training; [] when the template refuses the conversation or its mask is invalid."""
    try:
        return encoder.encode_all([line.conversation for line in lines], [line.prompts for line in lines])
    except UserError:
        return [[]] if len(lines) == 1 else [sample for line in lines for sample in _samples(encoder, [line])]


def _kept_ids(encoder: ChatEncoder, line: Answered) -> dict[str, Any]:
    messages = line.conversation.messages
    before = sum(message["role"] == "assistant" for message in messages) - len(line.answers)  # greetings
    return {"tokenizer": encoder.vocabulary_hash, "turns": [*[None] * before, *map(list, line.answers)]}
