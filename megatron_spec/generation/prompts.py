"""Prompts from question files (lines with `turns`) and chat JSON lines, and the dialogue that answers them.

A prompt is a list of rounds: the messages up to the next answer. Answers already in a chat file are dropped, because
the base gives its own. An assistant message before the first question is a greeting and is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import (
    OF_ANSWERS,
    Conversation,
    check_text,
    parse_conversation,
    read_extras,
    read_identifier,
)
from megatron_spec.data.lines import load_line, numbered_lines
from megatron_spec.generation.answers import Answered, Message, answer_message


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer.

    Attributes:
        identifier: unique in its file; names the conversation in outputs and seeds its sampling.
        category: category in the question file; 'none' without one.
        rounds: messages before the first answer, before the second, ...
        where: 'FILE line N', for messages.
        tools, template_kwargs: see `Conversation`.
    """

    identifier: str
    category: str
    rounds: tuple[tuple[Message, ...], ...]
    where: str = ""
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON lines file, at most `limit`; see `iter_prompts`."""
    return list(iter_prompts(path, limit))


def iter_prompts(path: Path | str, limit: int | None = None) -> Iterator[Prompt]:
    """Iterate over the prompts of a JSON lines file, at most `limit`.

    A line is a question `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}` (optionally with a
    `system` text) or a conversation as read by data.conversations. The identifier is conversation_id, id, or the file
    name plus question_id (question files start at the same number); the line number when there is none.

    Raises:
        UserError: no such file, no prompt, malformed lines (names file and line), duplicate identifiers, tool turns.
    """
    path = Path(path)
    seen: dict[str, str] = {}
    for where, number, record in _records(path):
        if limit is not None and len(seen) >= limit:
            break
        parse = _question if "turns" in record else _chat
        prompt = parse(record, where, path.stem, number)
        if prompt.identifier in seen:
            raise UserError(f"{where}: identifier {prompt.identifier!r} was used before in {seen[prompt.identifier]}")
        seen[prompt.identifier] = where
        yield prompt
    if not seen:
        raise UserError(f"{path} contains no prompts")


def _records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for number, line in numbered_lines(path, "prompt", gaps=True):
        where = f"{path} line {number}"
        record = load_line(line, where)
        if not isinstance(record, dict):
            raise UserError(f"{where}: found a JSON {type(record).__name__}, expected an object")
        yield where, number, record


def _question(record: dict[str, Any], where: str, stem: str, number: int) -> Prompt:
    turns = record["turns"]
    if both := [key for key in ("conversations", "messages") if key in record]:
        raise UserError(f"{where}: found turns and {both[0]}, expected exactly one of conversations, messages, turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise UserError(f"{where}: found turns {str(turns)[:80]!r}, expected a list of texts, none of them empty")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(f"{where}: found system {str(system)[:80]!r}, expected a text")
    check_text([turns, system], where)
    system_turn: tuple[Message, ...] = ({"role": "system", "content": system},) if system and system.strip() else ()
    rounds = tuple((*(() if i else system_turn), {"role": "user", "content": turn}) for i, turn in enumerate(turns))
    identifier = read_identifier(record, where) or f"{stem}-{record.get('question_id', number)}"
    return Prompt(identifier, str(record.get("category") or "none"), rounds, where, *read_extras(record, where))


def _chat(record: dict[str, Any], where: str, stem: str, number: int) -> Prompt:
    conversation = parse_conversation({k: v for k, v in record.items() if k not in OF_ANSWERS}, where)
    rounds: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            raise UserError(f"{where}: found tool turns, which cannot be answered again: leave the conversation out")
        asked = any(m["role"] == "user" for m in waiting)
        if message["role"] == "assistant" and asked:
            rounds.append(tuple(waiting))
            waiting = []
        elif message["role"] != "assistant" or not rounds:
            waiting.append(message)
    if any(m["role"] == "user" for m in waiting):
        rounds.append(tuple(waiting))
    if not rounds:
        raise UserError(f"{where}: no user message, so nothing to answer")
    identifier = conversation.identifier or f"{stem}-{number}"
    category = str(record.get("category") or "none")
    return Prompt(identifier, category, tuple(rounds), where, conversation.tools, conversation.template_kwargs)


def questions(messages: Iterable[Message]) -> list[tuple[Any, Any]]:
    """(role, content) of all messages but the answers."""
    return [(m["role"], m["content"]) for m in messages if m["role"] != "assistant"]


def ask_all(dialogues: Iterable[Dialogue], encoder: ChatEncoder, limit: int) -> list[tuple[Dialogue, list[int]]]:
    """The dialogues that wait for an answer and can be asked, with the token ids of their next round.

    One that the chat template refuses ends, with `problem` set.
    """
    waiting = [d for d in dialogues if d.waits]
    try:
        prompts = encoder.prompts([d.question() for d in waiting])
    except UserError:  # of one of them
        asked = [(d, d.ask_or_end(encoder, limit)) for d in waiting]
    else:
        asked = [(d, d.asks(text, ids, limit)) for d, (text, ids) in zip(waiting, prompts, strict=True)]
    return [(d, ids) for d, ids in asked if ids is not None]


def check_stop_ids(stop_ids: set[int]) -> None:
    """Raise UserError when there is none: every answer would be cut at max_new_tokens."""
    if not stop_ids:
        raise UserError(
            "no stop token: found no eos_token_id in config.json, generation_config.json or the tokenizer; add one"
        )


@dataclass
class Dialogue:
    """A prompt with its answers so far.

    Attributes:
        prompt: the conversation to answer.
        messages: the dialogue so far, including answers.
        asked: token ids of the prompt of each answer so far (their texts in `_texts`).
        answers: tokens of each answer so far, including the stop token.
        rejected: `Generation.rejected` of each answer so far.
        truncated: the last answer was cut; no round is asked after a cut answer.
        problem: why it ended before its last round, '' otherwise.
        unasked: it ended because a round could not be asked.
    """

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    rejected: list[list[int]] = field(default_factory=list)
    truncated: bool = False
    problem: str = ""
    unasked: bool = False
    _texts: list[str] = field(default_factory=list)
    _waiting: tuple[str, list[int]] = ("", [])

    @property
    def waits(self) -> bool:
        """True while a round is left to answer."""
        return len(self.answers) < len(self.prompt.rounds) and not self.truncated and not self.problem

    def _conversation(self, messages: list[Message]) -> Conversation:
        prompt = self.prompt
        return Conversation(messages, prompt.where, prompt.identifier, prompt.tools, prompt.template_kwargs)

    def question(self) -> Conversation:
        """The dialogue so far and the next round."""
        return self._conversation([*self.messages, *self.prompt.rounds[len(self.answers)]])

    def ask(self, encoder: ChatEncoder, limit: int) -> list[int] | None:
        """Token ids of the next round; None, with `problem` set, when `limit` leaves no room for an answer."""
        return self.asks(*encoder.prompts([self.question()])[0], limit)

    def ask_or_end(self, encoder: ChatEncoder, limit: int) -> list[int] | None:
        """`ask`; None, with `problem` set, also when the chat template refuses the round."""
        try:
            return self.ask(encoder, limit)
        except UserError as error:
            self.problem, self.unasked = f"round {len(self.answers)} cannot be asked: {error}", True
            return None

    def asks(self, text: str, ids: list[int], limit: int) -> list[int] | None:
        """`ask`, given the prompt of `question`."""
        if len(ids) >= limit:
            self.problem = f"round {len(self.answers)} has {len(ids)} tokens, the context holds {limit}"
            self.unasked = True
            return None
        self._waiting = (text, ids)
        return ids

    def take(self, tokens: list[int], stopped: bool, tokenizer: Any, rejected: Sequence[int] = ()) -> None:
        """Add an answer. An answer without text ends the dialogue and is dropped: a template cannot render it."""
        message = answer_message(tokens[:-1] if stopped else tokens, tokenizer)
        if message is None:
            self.problem = f"round {len(self.answers)} got an empty answer"
            return
        self.messages += [*self.prompt.rounds[len(self.answers)], message]
        text, ids = self._waiting
        self._texts.append(text)
        self.asked.append(ids)
        self.answers.append(tokens)
        self.rejected.append(list(rejected))
        self.truncated = not stopped
        if self.truncated and (left := len(self.prompt.rounds) - len(self.answers)):
            self.problem = (
                f"round {len(self.answers) - 1} was cut at {len(tokens)} tokens (max_new_tokens, or the end of the "
                f"context), so {left} further rounds were not asked"
            )

    def answered(self) -> Answered:
        """The dialogue so far, to find its `answer_ids`."""
        return Answered(self._conversation(self.messages), self._texts, self.asked, self.answers)

    def seed(self, seed: int) -> int:
        """Seed for sampling the next answer, independent of all other prompts."""
        return zlib.crc32(f"{seed}:{self.prompt.identifier}:{len(self.answers)}".encode())
