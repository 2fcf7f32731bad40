"""Conversations in JSON lines -> token ids and the assistant turn each token belongs to.

A line is `{"conversations": [{"role": "user", "content": "..."}, ...]}`; the key may be `messages`, and ShareGPT's
`from`/`value` with `human`/`gpt` are understood. The tokenizer's own chat template renders it, so that training sees
what serving sends. Which tokens the assistant wrote comes from the template's `{% generation %}` marks when it has
them, and otherwise from rendering the conversation up to each assistant turn (`_incremental_spans`).

The header that opens a turn is never supervised; the token that ends it always is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_spec.config import UserError, suggest
from megatron_spec.data.byte_lengths import TokenPlaces, byte_lengths
from megatron_spec.data.tokenizer import load_tokenizer, special_ids

__all__ = [
    "ROLES",
    "BadConversation",
    "ChatEncoder",
    "Conversation",
    "Sample",
    "has_generation_marks",
    "load_tokenizer",
    "numbered_lines",
    "parse_conversation",
    "parse_line",
    "parse_message",
    "read_conversations",
]

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
"""Role names that are understood -> the role a chat template knows."""


class BadConversation(UserError):
    """A conversation that cannot be used. `reason` says why in words that many conversations share, to be counted."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PLACEHOLDER = "placeholder"
NOT_TEXT, NO_MESSAGE = "content that is not text", "message without role and content"


@dataclass(frozen=True)
class Conversation:
    """One line of a file, checked.

    Attributes:
        messages: dictionaries with `role` (system, user, assistant, tool), `content`, and whatever else the line gave
            (`tool_calls`, `name`): templates read it.
        where: 'FILE line N', for messages.
        tools: tool schemas for the template, or None.
    """

    messages: list[dict[str, Any]]
    where: str
    identifier: str = ""
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    Attributes:
        tokens: int64 [N].
        turns: int32 [N], 0 where not supervised, n on the tokens of the n-th assistant turn (its end token included).
        where: 'FILE line N', for messages.
    """

    tokens: Tensor
    turns: Tensor
    where: str = field(default="", compare=False)

    def __len__(self) -> int:
        return int(self.tokens.numel())


def _content(message: dict[str, Any], where: str, calls_tools: bool) -> str:
    value = message.get("content", message.get("value"))
    if isinstance(value, list):  # OpenAI's list of parts
        bad = [part for part in value if not (isinstance(part, dict) and isinstance(part.get("text"), str))]
        if bad:
            problem = f"{where}: content part {str(bad[0])[:80]!r} is not text: only text is supported"
            raise BadConversation(problem, NOT_TEXT)
        value = "".join(part["text"] for part in value)
    if value is None and calls_tools:
        return ""
    if not isinstance(value, str):
        raise BadConversation(f"{where}: found content {str(value)[:80]!r}, expected text", NOT_TEXT)
    if not value.strip() and not calls_tools:
        raise BadConversation(f"{where}: empty content: remove the message or the conversation", "empty content")
    return value


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """A message with `role` and `content` under the names templates know. Raises UserError with `where`."""
    if not isinstance(message, dict):
        found = str(message)[:80]
        raise BadConversation(f"{where}: found {found!r}, expected an object with role and content", NO_MESSAGE)
    name = message.get("role", message.get("from"))
    if name is None or ("content" not in message and "value" not in message and not message.get("tool_calls")):
        found = ", ".join(message) or "none"
        raise BadConversation(f"{where}: found keys {found}, expected role and content (or from, value)", NO_MESSAGE)
    if not isinstance(name, str) or name not in ROLES:
        problem = f"unknown role {name!r}"
        raise BadConversation(f"{where}: {problem}{suggest(str(name), ROLES)}; known: {', '.join(ROLES)}", problem)
    role = ROLES[name]
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    rest = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    return {"role": role, "content": _content(message, where, calls_tools), **rest}


def parse_conversation(record: Any, where: str) -> Conversation:
    """A checked conversation from one JSON value. Raises UserError with `where`."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: found a JSON {type(record).__name__}, expected an object")
    keys = [key for key in ("conversations", "messages") if key in record]
    if len(keys) != 1:
        found = " and ".join(keys) or f"keys {', '.join(record) or 'none'}"
        raise UserError(f"{where}: found {found}, expected exactly one of conversations, messages")
    raw = record[keys[0]]
    if not isinstance(raw, list) or not raw:
        raise UserError(f"{where}: {keys[0]} must be a list of at least one message")
    messages = [parse_message(message, f"{where}, message {i}") for i, message in enumerate(raw)]
    identifier = record.get("conversation_id", record.get("id", ""))
    return Conversation(messages, where, str(identifier), record.get("tools") or None)


def numbered_lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of a JSON lines file of conversations; empty lines at its end are left out.

    Raises UserError for a missing file, an empty line inside it, and a file without any line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: expected conversations in JSON lines")
    blank = found = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise UserError(f"{path} line {blank}: empty line inside the file: remove it")
            found += 1
            yield number, line
    if not found:
        raise UserError(f"{path} holds no conversation")


def parse_line(raw: bytes, where: str, require_assistant: bool = True) -> Conversation:
    """The conversation of one line. Raises UserError with `where`, also when there is no assistant turn."""
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason}): convert the file to UTF-8") from None
    except ValueError as error:
        raise UserError(f"{where}: malformed JSON ({error}): expected one JSON object a line") from None
    conversation = parse_conversation(record, where)
    if require_assistant and not any(m["role"] == "assistant" for m in conversation.messages):
        raise UserError(f"{where}: no assistant turn, so nothing to learn from: answer the prompts first")
    return conversation


def read_conversations(path: Path | str, require_assistant: bool = True) -> Iterator[Conversation]:
    """Every conversation of a JSON lines file, in order.

    Raises UserError with file and line number: missing file, malformed JSON, empty line inside, missing keys, unknown
    role, empty content and (unless `require_assistant` is False: prompt files) no assistant turn; also for an empty
    file.
    """
    for number, line in numbered_lines(path):
        yield parse_line(line, f"{path} line {number}", require_assistant)


class ChatEncoder:
    """Turns conversations into samples with one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        stop_token_ids: further ids that end a turn (generation_config.json), beside the tokenizer's special tokens.
        use_generation_marks: None takes the template's marks when it has them; True requires, False ignores them.

    Raises UserError when the tokenizer has no chat template or no offsets.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Collection[int] = (), use_generation_marks: bool | None = None
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("the tokenizer has no chat template: add chat_template to its tokenizer_config.json")
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("the tokenizer reports no character offsets: a tokenizer.json (fast tokenizer) is needed")
        self.tokenizer = tokenizer
        marked = has_generation_marks(tokenizer)
        if use_generation_marks and not marked:
            raise UserError("the chat template has no {% generation %} marks")
        self.uses_marks = marked if use_generation_marks is None else use_generation_marks
        eos = tokenizer.eos_token_id
        self._stop_ids = set(stop_token_ids) | (set() if eos is None else {eos})
        self._end_ids = self._stop_ids | special_ids(tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._byte_lengths_V = byte_lengths(tokenizer)
        self._is_end_V = np.zeros(max(len(tokenizer), *self._end_ids, 0) + 1, dtype=bool)
        self._is_end_V[sorted(self._end_ids)] = True

    @functools.cached_property
    def _opens_answers(self) -> bool:
        """The template writes the assistant's header when it is asked for an answer."""
        asked = Conversation([{"role": "user", "content": _PLACEHOLDER}], "a question")
        texts = [self._render(asked, asked.messages, add_generation_prompt=asks) for asks in (False, True)]
        return bool(str(texts[1]) != str(texts[0]))

    def encode(self, conversation: Conversation) -> Sample:
        """Tokens and turns. Raises UserError when the template refuses the conversation or the mask makes no sense."""
        return self.encode_all([conversation])[0]

    def encode_all(self, conversations: Sequence[Conversation]) -> list[Sample]:
        """`encode` of several conversations; faster, because the tokenizer sees all texts at once."""
        if self.uses_marks:
            found = [self._marked(conversation) for conversation in conversations]
        else:
            texts = [str(self._render(conversation, conversation.messages)) for conversation in conversations]
            encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            found = [
                self._incremental(conversation, text, encoding.ids)
                for conversation, text, encoding in zip(conversations, texts, encodings, strict=True)
            ]
        return [self._sample(c, ids, turns) for c, (ids, turns) in zip(conversations, found, strict=True)]

    @staticmethod
    def _sample(conversation: Conversation, ids: NDArray[Any], turns: NDArray[Any]) -> Sample:
        supervised = int(np.count_nonzero(turns))
        if supervised == 0:
            raise UserError(f"{conversation.where}: the chat template marks no token as the assistant's")
        if supervised == len(turns):
            raise UserError(f"{conversation.where}: every token counts as the assistant's: the chat template is wrong")
        return Sample(torch.from_numpy(ids), torch.from_numpy(turns), conversation.where)

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation that waits for an answer, the assistant's header included."""
        text = self._render(conversation, conversation.messages, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question_ids(self) -> list[int]:
        """Token ids that stand in front of the first question: what the template writes before the user's words."""
        asked = Conversation([{"role": "user", "content": _PLACEHOLDER}], "a question")
        text = str(self._render(asked, asked.messages)).split(_PLACEHOLDER)[0].rstrip(" ")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]], **options: Any) -> Any:
        options = {"tokenize": False, **options}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=conversation.tools, **options)
        except Exception as error:  # templates raise what they like
            message = f"{conversation.where}: the chat template refuses this conversation: {error}"
            raise UserError(message) from error

    def _marked(self, conversation: Conversation) -> tuple[NDArray[Any], NDArray[Any]]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._render(conversation, conversation.messages, **options)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        turns, turn = np.zeros(len(ids), dtype=np.int32), 0
        for i, token in enumerate(ids):
            if mask[i]:
                turn += 0 if i and mask[i - 1] else 1
                turns[i] = turn
            elif i and mask[i - 1] and ids[i - 1] not in self._end_ids and token in self._end_ids:
                turns[i] = turn  # marks around the content only: the end of the turn is learnt too
        return np.array(ids, dtype=np.int64), turns

    def _incremental(self, conversation: Conversation, text: str, ids: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        ids_N = np.array(ids, dtype=np.int64)
        places: TokenPlaces | _TokenOffsets | None = None
        if self._byte_lengths_V is not None:
            places = TokenPlaces(text, ids_N, self._byte_lengths_V)
        if places is None or not places.fits:
            places = _TokenOffsets(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False))
        special = self._is_end_V[ids_N].nonzero()[0].tolist()
        ends = [(places.character_end(i), int(ids_N[i])) for i in special]
        turns_N = np.zeros(len(ids_N), dtype=np.int32)
        for turn, (begin, end) in enumerate(self._incremental_spans(conversation, text, ends), start=1):
            first, behind = places.tokens_of(begin, end)
            turns_N[first:behind] = turn
        return ids_N, turns_N

    def _incremental_spans(
        self, conversation: Conversation, text: str, ends: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Character span of each assistant turn in `text`, the rendering of the whole conversation.

        `ends` are the places behind special tokens, and their ids.

        A turn begins where the rendering of everything before it (with the header that asks for an answer) ends,
        and ends with the first special token behind its content.
        """
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [_shared(self._before(conversation, i), text) for i in turns]
        spans = []
        for i, begin, bound in zip(turns, begins, [*begins[1:], len(text)], strict=True):
            # Behind the words of a turn that calls tools its calls follow, among special tokens of their own.
            content = "" if messages[i].get("tool_calls") else messages[i]["content"].strip()
            # The last turn may think before it speaks, and think the very words.
            find = text.rfind if i == len(messages) - 1 else text.find
            at = find(content, begin, bound) if content else -1
            if at >= 0:
                # A template that ignores add_generation_prompt leaves the header here: it is not the assistant's text.
                header_left = not self._opens_answers and any(begin < end <= at for end, _ in ends)
                begin = at if header_left else begin
                behind = [end for end, _ in ends if at + len(content) < end <= bound]
            else:  # the template rewrote the content (removed its reasoning, added tool calls)
                behind = [end for end, token in ends if begin < end <= bound and token in self._stop_ids]
            end = behind[0] if behind else self._end_without_token(conversation, i, text)
            if not begin < end <= bound:
                raise UserError(
                    f"{conversation.where}, message {i}: cannot find this assistant turn in the rendered conversation "
                    "(the chat template rewrites earlier turns): use a template with {% generation %} marks"
                )
            spans.append((begin, end))
        return spans

    def _end_without_token(self, conversation: Conversation, i: int, text: str) -> int:
        after = self._render(conversation, conversation.messages[: i + 1])
        return len(text[: _shared(after, text)].rstrip())

    def _before(self, conversation: Conversation, i: int) -> str:
        """What is rendered in front of message i's text."""
        if i > 0:
            return str(self._render(conversation, conversation.messages[:i], add_generation_prompt=True))
        # Without messages a template adds no default system prompt, so look at what stands before a first answer.
        first = {"role": "assistant", "content": _PLACEHOLDER}
        return str(self._render(conversation, [first])).rsplit(_PLACEHOLDER, 1)[0]


class _TokenOffsets:
    """Places of tokens from the tokenizer's own offsets: for every tokenizer, and slower than `TokenPlaces`."""

    fits = True

    def __init__(self, encoding: Any) -> None:
        self.offsets: list[tuple[int, int]] = encoding.offsets

    def character_end(self, i: int) -> int:
        """Character behind token i."""
        return self.offsets[i][1]

    def tokens_of(self, begin: int, end: int) -> tuple[int, int]:
        """Range of the tokens that hold any of the characters begin .. end-1 (end > begin)."""
        inside = [i for i, (b, e) in enumerate(self.offsets) if b < end and e > max(b, begin)]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _shared(one: str, other: str) -> int:
    """Number of characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def has_generation_marks(tokenizer: Any) -> bool:
    """True when the tokenizer's chat template marks what the assistant writes."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        template = tokenizer.get_chat_template()
    return bool(_GENERATION_MARK.search(template))
