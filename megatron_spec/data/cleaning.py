"""One record of any tool's file -> one line this package trains on, or the reason why not."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron_spec.data.chat import ROLES, BadConversation, parse_conversation

_KEYS = ("messages", "conversations", "conversation")
_MORE_ROLES = {"prompter": "user", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "bot": "assistant"}
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class CleanOptions:
    """What to make of a conversation.

    Attributes:
        make_prompts: keep the questions alone.
        max_characters: longer ones are left out; 0: no limit.
    """

    make_prompts: bool = False
    max_characters: int = 0


@dataclass
class Cleaned:
    """What became of one record.

    Attributes:
        line: ready to be written, or None.
        reason: why not, '' otherwise.
        repairs: what was mended.
    """

    line: dict[str, Any] | None = None
    reason: str = ""
    repairs: Counter[str] = field(default_factory=Counter)


def identifier(content: Any) -> str:
    """16 hexadecimal digits from the content."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_held_out(name: str, share: float) -> bool:
    """Decided by the id alone, so that a conversation never changes sides."""
    return int(name, 16) < share * 16**16


def clean(record: Any, options: CleanOptions) -> Cleaned:
    """A line with a stable id, or the reason why the record cannot be used.

    Understood: `messages`, `conversations` or `conversation` under OpenAI's or ShareGPT's names, a `system` text beside
    them, and question files with `turns` or `prompt` (a list of texts; only with `make_prompts`).
    """
    result = Cleaned()
    try:
        messages = parse_conversation({"messages": _messages(record, result.repairs)}, "").messages
    except BadConversation as error:
        result.reason = error.reason
        return result
    roles = {message["role"] for message in messages}
    if "user" not in roles:
        result.reason = "no user turn"
    elif "assistant" not in roles and not options.make_prompts:
        result.reason = "no assistant turn (--make-prompts keeps the questions)"
    else:
        messages = _trim(messages, result.repairs, keep_questions=options.make_prompts)
        result.reason = _problem(messages, options)
    if not result.reason:
        result.line = _line(record, messages, options)
    return result


def _messages(record: Any, repairs: Counter[str]) -> list[Any]:
    """The record's messages under names that `parse_conversation` knows. Raises BadConversation when it has none."""
    if not isinstance(record, dict):
        raise BadConversation("", f"a JSON {type(record).__name__} instead of an object")
    keys = [key for key in _KEYS if isinstance(record.get(key), list)]
    texts = [record[key] for key in ("turns", "prompt") if isinstance(record.get(key), list)]
    if keys:
        messages = [_renamed(message) for message in record[keys[0]]]
    elif texts:
        messages = [{"role": "user", "content": text} for text in texts[0]]
    else:
        raise BadConversation("", f"no messages or conversations, only the keys {', '.join(record)[:80] or '(none)'}")
    if not messages:
        raise BadConversation("", "no messages")
    told = [m for m in messages if not _is_empty_system(m)]
    repairs["empty system turn removed"] += len(messages) - len(told)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and not (told and _role(told[0]) == "system"):
        told = [{"role": "system", "content": system}, *told]
    return told


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
    """Without answers before the first question and, unless `keep_questions`, questions behind the last answer."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    begin = head
    while begin < len(messages) and messages[begin]["role"] in ("assistant", "tool"):
        begin += 1
    end = len(messages)
    while not keep_questions and end > begin and messages[end - 1]["role"] != "assistant":
        end -= 1
    if begin < end:  # else the conversation is dropped, and nothing was mended
        repairs["answer without a question removed at the start"] += begin > head
        repairs["question without an answer removed at the end"] += end < len(messages)
    return messages[:head] + messages[begin:end]


def _problem(messages: Messages, options: CleanOptions) -> str:
    """Why the conversation cannot be used, or ''."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return "no question with an answer"
    if options.make_prompts and ("tool" in roles or any(m.get("tool_calls") for m in messages)):
        return "tool turns, which cannot be asked again"
    before = "system"
    answers = "assistant" in roles  # question files hold questions alone
    for message in messages:
        role = message["role"]
        allowed = {
            "system": {"system", "user"}, "user": {"assistant"}, "assistant": {"user", "tool"},
            "tool": {"tool", "assistant"},
        }[before]  # fmt: skip
        if role not in allowed and (answers or role != "user"):
            return f"broken alternation: {role} after {before}"
        before = role
    characters = sum(len(m["content"]) for m in messages)
    if options.max_characters and characters > options.max_characters:
        return f"longer than {options.max_characters} characters"
    return ""


def _line(record: dict[str, Any], messages: Messages, options: CleanOptions) -> dict[str, Any]:
    if not options.make_prompts:
        line: dict[str, Any] = {"conversation_id": identifier(messages), "conversations": messages}
        return {**line, "tools": record["tools"]} if record.get("tools") else line
    asked = {
        "system": "\n".join(m["content"] for m in messages if m["role"] == "system"),
        "turns": [m["content"] for m in messages if m["role"] == "user"],
    }
    about = {"conversation_id": identifier(asked), "category": record.get("category")}
    return {key: value for key, value in {**about, **asked}.items() if value}
