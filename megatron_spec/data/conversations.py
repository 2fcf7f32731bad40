"""Read conversations from JSON lines, with errors that name the line.

A line is `{"conversations": [{"role": "user", "content": "..."}, ...]}`; the key may be `messages`, and ShareGPT's
`from`/`value` with `human`/`gpt` are accepted. Optional keys: `system` (a system text), `tools` (schemas),
`chat_template_kwargs` (arguments of the chat template, such as enable_thinking), `answer_ids` (see `AnswerIds`) and
`rejected` (see `Rejections`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError, suggest
from megatron_spec.data.lines import load_line, numbered_lines

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Accepted role name -> role in chat templates."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that servers and chat templates use for a model's reasoning; lines keep the first."""

OF_ANSWERS = ("answer_ids", "rejected")
"""Keys of a line that belong to its answers, and to no others."""

WEIGHTS = ("weight", "train", "loss")
"""Keys of a message by which fine-tuning formats leave it out of training: 0 or false."""

RESERVED_KWARGS = frozenset(
    {
        "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of apply_chat_template that are not passed to the template."""

NOT_TEXT, NO_MESSAGE = "content that is not text", "message without role and content"
SURROGATE = "a lone surrogate, half of a character"


class BadConversation(UserError):
    """A conversation that cannot be used. `reason` is a general form of the message, for counting."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class AnswerIds:
    """Token ids that a base generated, for a line whose text does not tokenise to the same ids.

    Attributes:
        tokenizer: `data.tokenizer.vocabulary_hash` of the tokenizer that they belong to.
        turns: one entry per assistant message: its ids, with the end token if there was one, or None for a message
            that the base did not generate.
    """

    tokenizer: str
    turns: list[list[int] | None]


@dataclass(frozen=True)
class Rejections:
    """Where the base rejected the tokens of a draft, from generate.py --save-rejections.

    Attributes:
        tokenizer: see `AnswerIds`.
        turns: one entry per assistant message: indices in its tokens of those that the base put in place of a rejected
            draft token, or None for a message that the base did not generate.
    """

    tokenizer: str
    turns: list[list[int] | None]


@dataclass(frozen=True)
class Conversation:
    """One validated line of a file.

    Attributes:
        messages: dictionaries with `role` (system, user, assistant, tool), `content`, and any other keys of the line
            (`reasoning_content`, `tool_calls`, `name`) for templates. `arguments` of tool calls are objects.
        where: 'FILE line N', for messages.
        tools: tool schemas for the template, or None.
        template_kwargs: arguments of the chat template; they override those of the run.
        answer_ids: ids to train on instead of the text of the answers.
        rejected: where the base rejected the tokens of a draft, if that was recorded.
    """

    messages: list[dict[str, Any]]
    where: str
    identifier: str = ""
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer_ids: AnswerIds | None = None
    rejected: Rejections | None = None


def check_text(value: Any, where: str) -> None:
    """Raise BadConversation if a text in a JSON value has a lone surrogate, which UTF-8 and tokenizers reject."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                found = f"\\u{ord(value[error.start]):04x}"
                raise BadConversation(f"{where}: found {found}, {SURROGATE}: correct the text", SURROGATE) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, where)
            check_text(item, where)
    elif isinstance(value, list):
        for item in value:
            check_text(item, where)


def _from_json(value: Any, kind: type, what: str, where: str) -> Any:
    """`value`, parsed if it is JSON text, of type `kind`. Raises BadConversation."""
    words = "a JSON object" if kind is dict else "a JSON list"
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value or "{}")
        except ValueError:
            found = None
    if not isinstance(found, kind):
        problem = f"{what} that are not {words}"
        raise BadConversation(f"{where}: found {what} {str(value)[:80]!r}, expected {words}", problem)
    return found


def read_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a chat template from a JSON object or JSON text. Raises BadConversation with `where`."""
    found: dict[str, Any] = _from_json(value, dict, "chat_template_kwargs", where)
    if wrong := sorted(RESERVED_KWARGS & set(found)):
        problem = f"chat_template_kwargs with {wrong[0]}, which is not an argument of the template"
        raise BadConversation(f"{where}: {problem}: leave it out", problem)
    return found


def _content(message: dict[str, Any], where: str, may_be_empty: bool) -> str:
    value = message.get("content", message.get("value"))
    if isinstance(value, list):  # OpenAI's list of parts
        bad = [part for part in value if not (isinstance(part, dict) and isinstance(part.get("text"), str))]
        if bad:
            problem = f"{where}: content part {str(bad[0])[:80]!r} is not text: only text is supported"
            raise BadConversation(problem, NOT_TEXT)
        value = "".join(part["text"] for part in value)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise BadConversation(f"{where}: found content {str(value)[:80]!r}, expected text", NOT_TEXT)
    if not value.strip() and not may_be_empty:
        raise BadConversation(f"{where}: empty content: remove the message or the conversation", "empty content")
    check_text(value, where)
    return value


def _reasoning(message: dict[str, Any], where: str) -> str:
    """Reasoning of the message under any of the names, or ''."""
    found = {name: message[name] for name in REASONING if message.get(name)}
    if any(not isinstance(value, str) for value in found.values()):
        raise BadConversation(f"{where}: found reasoning that is not text", "reasoning that is not text")
    if len(set(found.values())) > 1:
        problem = f"{' and '.join(found)} that differ"
        raise BadConversation(f"{where}: found {problem}: keep one of them", problem)
    return next(iter(found.values()), "")


def _tool_calls(value: Any, where: str) -> list[Any]:
    """Tool calls with `arguments` as objects: servers write JSON text, templates read objects."""
    calls = []
    for call in _from_json(value, list, "tool_calls", where):
        if not isinstance(call, dict):
            raise BadConversation(f"{where}: found tool call {str(call)[:80]!r}, expected an object", "bad tool call")
        inner = call.get("function", call)
        if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
            inner = {**inner, "arguments": _from_json(inner["arguments"], dict, "arguments of a tool call", where)}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return calls


def _with_tool_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """`message` with OpenAI's old `function_call` as one of `tool_calls`: templates do not read the former."""
    call = message.get("function_call")
    if not call:
        return message
    if message.get("tool_calls") or not isinstance(call, dict):
        problem = "function_call beside tool_calls" if message.get("tool_calls") else "function_call that is no object"
        raise BadConversation(f"{where}: found {problem}: write tool_calls alone", problem)
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """A message with `role` and `content` as templates read them. Raises BadConversation with `where`."""
    if not isinstance(message, dict):
        found = str(message)[:80]
        raise BadConversation(f"{where}: found {found!r}, expected an object with role and content", NO_MESSAGE)
    name = message.get("role", message.get("from"))
    calls = message.get("tool_calls") or message.get("function_call")
    if name is None or ("content" not in message and "value" not in message and not calls):
        found = ", ".join(message) or "none"
        raise BadConversation(f"{where}: found keys {found}, expected role and content (or from, value)", NO_MESSAGE)
    if not isinstance(name, str) or name not in ROLES:
        problem = f"unknown role {name!r}"
        raise BadConversation(f"{where}: {problem}{suggest(str(name), ROLES)}; known: {', '.join(ROLES)}", problem)
    message = _with_tool_calls(message, where)
    role, reasoning = ROLES[name], _reasoning(message, where)
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    known = ("role", "from", "content", "value", "tool_calls", *REASONING)
    rest = {key: value for key, value in message.items() if key not in known}
    if calls_tools:
        rest["tool_calls"] = _tool_calls(message["tool_calls"], where)
    if reasoning:
        rest["reasoning_content"] = reasoning
    check_text(rest, where)
    may_be_empty = calls_tools or (role == "assistant" and bool(reasoning))
    return {"role": role, "content": _content(message, where, may_be_empty), **rest}


def _with_system(messages: list[dict[str, Any]], system: Any, where: str) -> list[dict[str, Any]]:
    """`messages` preceded by the text of a `system` key, unless they already contain it."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    system_turn = parse_message({"role": "system", "content": system}, f"{where}, system")
    if messages[0]["role"] != "system":
        return [system_turn, *messages]
    if messages[0]["content"].strip() != system_turn["content"].strip():
        problem = "a system text that differs from the system message"
        raise BadConversation(f"{where}: found {problem}: keep one of them", problem)
    return messages


def _answer_ids(value: Any, messages: list[dict[str, Any]], where: str) -> AnswerIds:
    """`{"tokenizer": HASH, "turns": [[ids] or null, ...]}`. Raises BadConversation."""
    turns = value.get("turns") if isinstance(value, dict) else None
    name = value.get("tokenizer") if isinstance(value, dict) else None
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

    def fits(ids: Any) -> bool:
        """Ids of one answer, or None."""
        return ids is None or (isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids))

    right = isinstance(turns, list) and isinstance(name, str) and len(turns) == len(answers) and all(map(fits, turns))
    if not right or not any(turns or []) or (answers[0] == 0 and turns and turns[0]):
        problem = "answer_ids that do not fit the messages"
        raise BadConversation(
            f"{where}: found {problem}: expected a tokenizer and turns, a list of token ids (or null) for each of the "
            f"{len(answers)} answers; or remove the key to train on the text",
            problem,
        )
    assert isinstance(name, str) and isinstance(turns, list)
    return AnswerIds(name, turns)


def _rejected(value: Any, messages: list[dict[str, Any]], where: str) -> Rejections:
    """`{"tokenizer": HASH, "turns": [[indices] or null, ...]}`. Raises BadConversation."""
    turns = value.get("turns") if isinstance(value, dict) else None
    name = value.get("tokenizer") if isinstance(value, dict) else None
    answers = sum(message["role"] == "assistant" for message in messages)

    def fits(places: Any) -> bool:
        """Indices of one answer, or None."""
        return places is None or (isinstance(places, list) and all(type(i) is int and i >= 0 for i in places))

    if not (isinstance(name, str) and isinstance(turns, list) and len(turns) == answers and all(map(fits, turns))):
        problem = "rejected that does not fit the messages"
        raise BadConversation(
            f"{where}: found {problem}: expected a tokenizer and turns, a list of token indices (or null) for each of "
            f"the {answers} answers; or remove the key",
            problem,
        )
    return Rejections(name, turns)


def _advice(record: dict[str, Any]) -> str:
    if "turns" in record:
        return ": these are prompts; generate.py lets the base answer them"
    return ": tools/prepare_conversations.py converts other columns, such as instruction and output"


def parse_conversation(record: Any, where: str) -> Conversation:
    """A checked conversation from one JSON value. Raises UserError with `where`."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: found a JSON {type(record).__name__}, expected an object")
    keys = [key for key in ("conversations", "messages") if key in record]
    if len(keys) != 1:
        found = " and ".join(keys) or f"keys {', '.join(record) or 'none'}"
        columns = "" if keys else _advice(record)
        raise UserError(f"{where}: found {found}, expected exactly one of conversations, messages{columns}")
    raw = record[keys[0]]
    if not isinstance(raw, list) or not raw:
        raise BadConversation(f"{where}: {keys[0]} must be a list of at least one message", "no messages")
    messages = [parse_message(message, f"{where}, message {i}") for i, message in enumerate(raw)]
    messages = _with_system(messages, record.get("system"), where)
    identifier = read_identifier(record, where)
    given = record.get("answer_ids")
    answer_ids = None if given is None else _answer_ids(given, messages, where)
    rejected = None if record.get("rejected") is None else _rejected(record["rejected"], messages, where)
    return Conversation(messages, where, identifier, *read_extras(record, where), answer_ids, rejected)


def read_identifier(record: dict[str, Any], where: str) -> str:
    """`conversation_id` of a line, or `id`; '' without either. Raises BadConversation."""
    found = next((record[key] for key in ("conversation_id", "id") if record.get(key) not in (None, "")), "")
    check_text(str(found), where)
    return str(found)


def read_extras(record: dict[str, Any], where: str) -> tuple[list[Any] | None, dict[str, Any]]:
    """(tools, chat_template_kwargs) of a line, from values or JSON text. Raises BadConversation with `where`."""
    tools = _from_json(record["tools"], list, "tools", where) if record.get("tools") else None
    if tools is None and record.get("functions"):  # OpenAI's old form
        tools = [{"type": "function", "function": f} for f in _from_json(record["functions"], list, "functions", where)]
    kwargs = read_kwargs(record["chat_template_kwargs"], where) if record.get("chat_template_kwargs") else {}
    check_text([tools, kwargs], where)
    return tools or None, kwargs


def is_trained(message: Mapping[str, Any]) -> bool:
    """True for an answer without a weight of 0."""
    return message["role"] == "assistant" and not any(message.get(key) in (0, False) for key in WEIGHTS)


def check_weights(messages: list[dict[str, Any]], where: str) -> None:
    """Raise BadConversation for weights other than 0 and 1, for one that asks to train on what is no answer, and if no
    answer is trained on."""
    for i, message in enumerate(messages):
        found = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
        for key, value in found.items():
            problem = ""
            if not isinstance(value, (int, float)) or value not in (0, 1):
                problem, expected = f"{key} {str(value)[:40]!r}", "0 or 1: an answer is trained on or not"
            elif value and message["role"] != "assistant":
                problem, expected = f"{key} 1 or true on a {message['role']} message", "it on answers alone"
            elif value != next(iter(found.values())):
                problem, expected = f"{' and '.join(found)} that differ", "one of them"
            if problem:
                raise BadConversation(f"{where}, message {i}: found {problem}, expected {expected}", problem)
    if not any(map(is_trained, messages)) and any(message["role"] == "assistant" for message in messages):
        problem = "no answer that is trained on: all have weight 0"
        raise BadConversation(f"{where}: {problem}: remove the line, or a weight", problem)


def parse_line(raw: bytes, where: str) -> Conversation:
    """The conversation of one line. Raises UserError with `where`, also when there is no assistant turn."""
    conversation = parse_conversation(load_line(raw, where), where)
    if not any(m["role"] == "assistant" for m in conversation.messages):
        raise UserError(f"{where}: no assistant turn, so nothing to learn from: generate.py answers prompts")
    check_weights(conversation.messages, where)
    return conversation


def read_conversations(path: Path | str) -> Iterator[Conversation]:
    """Every conversation of a JSON lines file, in order.

    Raises UserError with file and line number: missing file, malformed JSON, empty line inside, missing keys, unknown
    role, empty content, no assistant turn; also for an empty file.
    """
    for number, line in numbered_lines(path):
        yield parse_line(line, f"{path} line {number}")
