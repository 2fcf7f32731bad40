"""Convert one record of another tool's file to a line that this package trains on, or give the reason why not."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_spec.data.conversations import (
    OF_ANSWERS,
    ROLES,
    BadConversation,
    Conversation,
    check_weights,
    is_trained,
    parse_conversation,
)

_KEYS = ("messages", "conversations", "conversation")
_PAIRS = {
    "instruction": ("output", "response", "completion"),
    "prompt": ("response", "completion", "output", "answer", "chosen"),
    "question": ("answer", "response", "output"), "query": ("response", "answer", "output"), "input": ("output",),
}  # fmt: skip
"""Column with a question -> columns that may hold its answer; the first that exists is used (alpaca, dolly, Nemotron,
TRL, ...). Either may be text or a list of messages."""
_INPUTS = ("input", "context")
"""Columns whose text is appended to an instruction."""
_MORE_ROLES = {"prompter": "user", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "bot": "assistant"}
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class CleanOptions:
    """How to clean conversations.

    Attributes:
        make_prompts: keep only the questions.
        max_characters: drop longer conversations; 0: no limit.
    """

    make_prompts: bool = False
    max_characters: int = 0


@dataclass
class Cleaned:
    """Result of cleaning one record.

    Attributes:
        line: line to write, or None.
        reason: why there is no line, else ''.
        repairs: corrections made.
    """

    line: dict[str, Any] | None = None
    reason: str = ""
    repairs: Counter[str] = field(default_factory=Counter)


def identifier(content: Any) -> str:
    """16 hexadecimal digits that identify the content."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_held_out(name: str, share: float) -> bool:
    """True for a share of the ids. Depends only on the id, so a conversation never changes sides."""
    return int(name, 16) < share * 16**16


def clean(record: Any, options: CleanOptions) -> Cleaned:
    """A line with a stable id, or the reason why the record cannot be used.

    Accepts `messages`, `conversations` or `conversation` with OpenAI's or ShareGPT's names; alpaca's columns and other
    pairs of question and answer (`_PAIRS`, with `history`); question files with `turns` or `prompt` (a list of texts;
    only with `make_prompts`). Also reads `system`, `tools`, `chat_template_kwargs`, `answer_ids` and `rejected`.
    """
    result = Cleaned()
    record = _without_preference(record, result.repairs)
    try:
        conversation = parse_conversation(_conversation(record, result.repairs), "")
        if not options.make_prompts:
            check_weights(conversation.messages, "")
    except BadConversation as error:
        result.reason = error.reason
        return result
    messages = conversation.messages
    roles = {message["role"] for message in messages}
    if "user" not in roles:
        result.reason = "no user turn"
    elif "assistant" not in roles and not options.make_prompts:
        result.reason = "no assistant turn (--make-prompts keeps the questions)"
    else:
        messages = _trim(messages, result.repairs, keep_questions=options.make_prompts)
        result.reason = _problem(messages, options)
    if not result.reason:
        found = {key: record[key] for key in OF_ANSWERS if record.get(key)}
        if messages != conversation.messages:
            for key in found:
                result.repairs[f"{key} removed with a message"] += 1
            found = {}
        result.line = _line(replace(conversation, messages=messages), record.get("category"), found, options)
    return result


def _conversation(record: Any, repairs: Counter[str]) -> dict[str, Any]:
    """The record with the names that `parse_conversation` reads. Raises BadConversation if it has no messages."""
    if not isinstance(record, dict):
        raise BadConversation("", f"a JSON {type(record).__name__} instead of an object")
    beside = {k: record[k] for k in ("tools", "functions", "chat_template_kwargs", *OF_ANSWERS) if record.get(k)}
    system = record.get("system") or record.get("system_prompt")
    return {"messages": _messages(record, repairs), "system": system, **beside}


def _without_preference(record: Any, repairs: Counter[str]) -> Any:
    """The record without the rejected answer of preference data, whose column has the name of `Rejections`."""
    if not isinstance(record, dict) or not isinstance(record.get("rejected"), str | list):
        return record
    repairs["rejected answer left out"] += 1
    return {key: value for key, value in record.items() if key != "rejected"}


def _messages(record: dict[str, Any], repairs: Counter[str]) -> list[Any]:
    keys = [key for key in _KEYS if isinstance(record.get(key), list)]
    texts: list[Any] = next((record[key] for key in ("turns", "prompt") if isinstance(record.get(key), list)), [])
    if keys:
        messages = [_renamed(message) for message in record[keys[0]]]
    elif not all(isinstance(message, dict) for message in texts):
        messages = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in texts]
    elif found := _pair(record) or texts:
        messages = [_renamed(message) for message in found]
    else:
        raise BadConversation("", f"no messages or conversations, only the keys {', '.join(record)[:80] or '(none)'}")
    if not messages:
        raise BadConversation("", "no messages")
    kept = [m for m in messages if not _is_empty_system(m)]
    repairs["empty system turn removed"] += len(messages) - len(kept)
    return kept


def _pair(record: dict[str, Any]) -> list[Any]:
    """Messages of a record with columns for a question and, optionally, its answer; [] if there is no question."""
    question = next((key for key in _PAIRS if record.get(key)), None)
    if question is None:
        return []
    answer = next((record[key] for key in _PAIRS[question] if record.get(key)), None)
    said = [] if answer is None else answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    if said and _role(_renamed(said[0])) != "assistant":  # preference data: the question is part of it
        return said
    if isinstance(record[question], list):
        return [*record[question], *said]
    parts = [record[question], *(record[key] for key in _INPUTS if question == "instruction" and record.get(key))]
    asked = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else record[question]
    history = record.get("history") or []
    if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
        raise BadConversation("", "history that is not a list of questions and answers")
    roles = ("user", "assistant")
    before = [{"role": r, "content": text} for pair in history for r, text in zip(roles, pair, strict=True)]
    return [*before, {"role": "user", "content": asked}, *said]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _renamed(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    name = message.get("role", message.get("from"))
    if not isinstance(name, str):
        return message
    role = name.lower()
    known = {k: v for k, v in message.items() if k not in ("from", "role", "value") and v is not None}
    content = message.get("content", message.get("value"))
    return {**known, "role": ROLES.get(role, _MORE_ROLES.get(role, name)), "content": content}


def _is_empty_system(message: Any) -> bool:
    if _role(message) != "system":
        return False
    content = message["content"]
    return content is None or (isinstance(content, str) and not content.strip())


def _trim(messages: Messages, repairs: Counter[str], keep_questions: bool) -> Messages:
    """Remove answers before the first question and, unless `keep_questions`, questions after the last answer."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    begin = head
    while begin < len(messages) and messages[begin]["role"] in ("assistant", "tool"):
        begin += 1
    end = len(messages)
    while not keep_questions and end > begin and messages[end - 1]["role"] != "assistant":
        end -= 1
    if begin < end:  # else the conversation is dropped, not corrected
        repairs["answer without a question removed at the start"] += begin > head
        repairs["question without an answer removed at the end"] += end < len(messages)
    return messages[:head] + messages[begin:end]


def _problem(messages: Messages, options: CleanOptions) -> str:
    """Why the conversation cannot be used, or ''."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return "no question with an answer"
    if options.make_prompts and ("tool" in roles or any(m.get("tool_calls") for m in messages)):
        return "tool turns, which cannot be answered again"
    before = "system"
    answers = "assistant" in roles  # question files hold only questions
    for message in messages:
        role = message["role"]
        allowed = {
            "system": {"system", "user"}, "user": {"assistant"}, "assistant": {"user", "tool"},
            "tool": {"tool", "assistant"},
        }[before]  # fmt: skip
        if role not in allowed and (answers or role != "user"):
            return f"broken alternation: {role} after {before}"
        before = role
    if answers and not options.make_prompts and not any(map(is_trained, messages)):
        return "no answer that is trained on: all have weight 0"
    characters = sum(len(m["content"]) for m in messages)
    if options.max_characters and characters > options.max_characters:
        return f"longer than {options.max_characters} characters"
    return ""


def _line(conversation: Conversation, category: Any, found: dict[str, Any], options: CleanOptions) -> dict[str, Any]:
    messages = conversation.messages
    beside = {"tools": conversation.tools, "chat_template_kwargs": dict(conversation.template_kwargs)}
    beside = {key: value for key, value in beside.items() if value}
    if not options.make_prompts:
        about = [messages, beside] if beside else messages
        return {"conversation_id": identifier(about), "conversations": messages, **beside, **found}
    asked: dict[str, Any] = {
        "system": "\n".join(m["content"] for m in messages if m["role"] == "system"),
        "turns": [m["content"] for m in messages if m["role"] == "user"],
        **beside,
    }
    line = {"conversation_id": identifier(asked), "category": category, **asked}
    return {key: value for key, value in line.items() if value}
