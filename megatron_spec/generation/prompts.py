"""Prompts to answer: question files (lines with `turns`) and chat JSON lines, and the dialogue that answers them.

A prompt is a list of rounds, each the messages that wait for one answer. Answers that a chat file already holds are
left out: the base gives its own. An assistant message before the first question is a greeting and stays.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder, Conversation, parse_conversation

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One conversation to hold.

    Attributes:
        identifier: unique in its file; names the conversation in outputs and seeds its sampling.
        category: of the question file; 'none' without one.
        rounds: messages before the first answer, before the second, ...
        where: 'FILE line N', for messages.
    """

    identifier: str
    category: str
    rounds: tuple[tuple[Message, ...], ...]
    where: str = ""


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON lines file, at most `limit`; see `iter_prompts`."""
    return list(iter_prompts(path, limit))


def iter_prompts(path: Path | str, limit: int | None = None) -> Iterator[Prompt]:
    """The prompts of a JSON lines file, at most `limit`, one after the other.

    A line is a question `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}` (with a `system` text if
    wanted) or a conversation as data.chat reads it. Identifiers are conversation_id, id, or question_id behind the
    file's name (question files begin at the same number); the line number when there is none.

    Raises:
        UserError: no such file, no prompt, malformed lines (file and line are named), equal identifiers, tool turns.
    """
    path = Path(path)
    seen: dict[str, str] = {}
    for where, number, record in _records(path):
        if limit is not None and len(seen) >= limit:
            break
        parse = _question if "turns" in record else _chat
        prompt = parse(record, where, path.stem, number)
        if prompt.identifier in seen:
            raise UserError(f"{where}: identifier {prompt.identifier!r} was used before, in {seen[prompt.identifier]}")
        seen[prompt.identifier] = where
        yield prompt
    if not seen:
        raise UserError(f"{path} holds no prompt")


def _records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: expected prompts in JSON lines")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path} line {number}"
            try:
                line = raw.decode("utf-8-sig")
                record = json.loads(line) if line.strip() else None
            except ValueError as e:
                raise UserError(f"{where}: not UTF-8 JSON ({e}): expected one JSON object a line") from None
            if record is None:
                continue
            if not isinstance(record, dict):
                raise UserError(f"{where}: found a JSON {type(record).__name__}, expected an object")
            yield where, number, record


def _question(record: dict[str, Any], where: str, stem: str, number: int) -> Prompt:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise UserError(f"{where}: found turns {str(turns)[:80]!r}, expected a list of texts, none of them empty")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(f"{where}: found system {str(system)[:80]!r}, expected a text")
    told: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
    rounds = tuple((*(() if i else told), {"role": "user", "content": turn}) for i, turn in enumerate(turns))
    identifier = str(record.get("conversation_id") or f"{stem}-{record.get('question_id', number)}")
    return Prompt(identifier, str(record.get("category") or "none"), rounds, where)


def _chat(record: dict[str, Any], where: str, stem: str, number: int) -> Prompt:
    conversation = parse_conversation(record, where)
    rounds: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            raise UserError(f"{where}: found tool turns, which cannot be answered anew: leave the conversation out")
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
    return Prompt(identifier, str(record.get("category") or "none"), tuple(rounds), where)


def check_stop_ids(stop_ids: set[int]) -> None:
    """Raise UserError when there is none: every answer would be cut at max_new_tokens."""
    if not stop_ids:
        raise UserError(
            "no stop token: found no eos_token_id in config.json, generation_config.json or the tokenizer; add one"
        )


@dataclass
class Dialogue:
    """A prompt while it is being answered.

    Attributes:
        prompt: what is asked.
        messages: what was said so far, answers included.
        answers: tokens of each answer so far, the stop token included.
        truncated: the last answer was cut; nothing is asked after a cut answer.
        problem: why it ended before its last round, '' otherwise.
        unasked: it ended because a round could not even be asked.
    """

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    truncated: bool = False
    problem: str = ""
    unasked: bool = False

    @property
    def waits(self) -> bool:
        """True when there is something left to answer."""
        return len(self.answers) < len(self.prompt.rounds) and not self.truncated and not self.problem

    def ask(self, encoder: ChatEncoder, limit: int) -> list[int] | None:
        """Token ids of the next round; None, with `problem` set, when they leave no room for an answer in `limit`."""
        messages = [*self.messages, *self.prompt.rounds[len(self.answers)]]
        ids = encoder.prompt_ids(Conversation(messages, self.prompt.where, self.prompt.identifier))
        if len(ids) >= limit:
            self.problem = f"round {len(self.answers)} has {len(ids)} tokens, the context holds {limit}"
            self.unasked = True
            return None
        return ids

    def take(self, tokens: list[int], stopped: bool, tokenizer: Any) -> None:
        """Add an answer. One without text ends the dialogue and is left out: a template cannot render it."""
        text = tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)
        if not text.strip():
            self.problem = f"round {len(self.answers)} was answered without a word"
            return
        self.messages += [*self.prompt.rounds[len(self.answers)], {"role": "assistant", "content": text}]
        self.answers.append(tokens)
        self.truncated = not stopped

    def seed(self, seed: int) -> int:
        """For sampling the next answer: the same whatever is answered beside it."""
        return zlib.crc32(f"{seed}:{self.prompt.identifier}:{len(self.answers)}".encode())
