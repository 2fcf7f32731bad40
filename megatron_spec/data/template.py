"""A tokenizer's chat template: renders messages as text, with the arguments and key names that the template reads."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_spec.config import UserError, suggest
from megatron_spec.data.conversations import REASONING, Conversation, read_kwargs

Messages = list[dict[str, Any]]
PLACEHOLDER = "placeholder"
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """Renders conversations with a tokenizer's own template.

    Reasoning is passed under every name that templates read (`conversations.REASONING`), and the arguments of tool
    calls as an object, or as JSON text if the template only handles text.

    Args:
        kwargs: arguments of the template (enable_thinking, ...) for all conversations; a conversation's own override.

    Raises UserError when the tokenizer has no chat template, or it does not read one of `kwargs`.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("the tokenizer has no chat template: add chat_template to its tokenizer_config.json")
        self.tokenizer = tokenizer
        self.kwargs = read_kwargs(dict(kwargs or {}), "--chat-template-kwargs")
        words = self._words = set(re.findall(r"\w+", str(tokenizer.chat_template)))  # a string, or named templates
        if unread := sorted(self.kwargs.keys() - words):
            raise UserError(
                f"--chat-template-kwargs: the chat template does not read {', '.join(unread)}"
                f"{suggest(unread[0], words)}: leave it out"
            )

    def render(self, conversation: Conversation, messages: Messages | None = None, **options: Any) -> Any:
        """Text of `messages` (default: all), or the result of transformers' apply_chat_template with `options`.

        Raises UserError when the template refuses them, or does not render an answer's tool calls.
        """
        messages = conversation.messages if messages is None else messages
        if "tool_calls" not in self._words and any(m.get("tool_calls") for m in messages):
            raise UserError(
                f"{conversation.where}: the chat template does not render tool_calls, so an answer would lose its "
                "calls: leave such lines out, or use a base whose template renders them"
            )
        try:
            return self._apply([self._spelt(m) for m in messages], conversation, options)
        except Exception as error:  # templates raise any exception
            message = f"{conversation.where}: the chat template refuses this conversation: {error}"
            raise UserError(message) from error

    def _apply(self, messages: Messages, conversation: Conversation, options: dict[str, Any]) -> Any:
        given = {"tokenize": False, **self.kwargs, **conversation.template_kwargs, **options}
        return self.tokenizer.apply_chat_template(messages, tools=conversation.tools, **given)

    def _spelt(self, message: dict[str, Any]) -> dict[str, Any]:
        if thought := message.get("reasoning_content"):
            message = {**message, **{name: message.get(name, thought) for name in REASONING}}
        if message.get("tool_calls") and self._arguments_are_text:
            message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        return message

    @functools.cached_property
    def _arguments_are_text(self) -> bool:
        """True if the template writes `arguments` unchanged (an object would be written as a Python repr, or fail)."""

        def text(form: Any) -> str | None:
            """Rendering of a tool call with arguments in this form; None if it fails."""
            call = {"id": "call00000", "type": "function", "function": {"name": PLACEHOLDER, "arguments": form}}
            asked = {"role": "user", "content": PLACEHOLDER}
            messages: Messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                return str(self._apply(messages, Conversation(messages, "a tool call"), {}))
            except Exception:
                return None

        as_object = text({"argument": "value"})
        if as_object is not None and "{'argument'" not in as_object:
            return False
        return text('{"argument": "value"}') is not None

    @functools.cached_property
    def opens_answers(self) -> bool:
        """True if the template writes the assistant's header as a generation prompt."""
        asked = Conversation([{"role": "user", "content": PLACEHOLDER}], "a question")
        texts = [str(self.render(asked, add_generation_prompt=asks)) for asks in (False, True)]
        return texts[1] != texts[0]

    @property
    def has_generation_marks(self) -> bool:
        """True if the template marks the assistant's text."""
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            template = self.tokenizer.get_chat_template()
        return bool(_GENERATION_MARK.search(template))


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    if isinstance(inner, dict) and isinstance(inner.get("arguments"), dict):
        inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner
