"""The files of an answering run on a server: what they have is not asked again.

OUTPUT            a line for every finished conversation
OUTPUT.rejected   conversations that were cut at the token limit, or that the server refused, with the reason
OUTPUT.meta.json  what the answers depend on (model, sampling, system prompt); a rerun must agree
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_spec.config import UserError
from megatron_spec.generation.answers import Message
from megatron_spec.generation.outputs import meta_path, record_lines, rejected_path, require_recorded
from megatron_spec.generation.prompts import Prompt, questions
from megatron_spec.runtime.files import changed_settings, drop_half_line, read_json, write_json


def opening(prompt: Prompt, system_prompt: str | None) -> list[Message]:
    """What a conversation begins with before its first round."""
    if system_prompt and not any(m["role"] == "system" for m in prompt.rounds[0]):
        return [{"role": "system", "content": system_prompt}]
    return []


class AnswerFile:
    """OUTPUT and the files beside it.

    Attributes:
        known: identifiers of its conversations -> (answered rounds, hash of what they ask), or None if not recorded.

    Raises UserError when they were written with other settings.
    """

    def __init__(self, output: Path, meta: dict[str, Any]) -> None:
        files = self.output, self.rejected = output, rejected_path(output)
        self.known = {r["conversation_id"]: _asked_in(r) for path in files for _, _, r in record_lines(path)}
        require_recorded(output, files)  # a line without an end, which is cut off below, may be of something else
        if self.known and (changed := changed_settings(read_json(meta_path(output)), meta)):
            raise UserError(f"{output} was answered with other settings ({changed}): use another output file")
        write_json(meta_path(output), meta)
        for path in files:
            drop_half_line(path)

    def open(self) -> tuple[IO[str], IO[str]]:
        """(output, rejected), opened for appending."""
        return self.output.open("a", encoding="utf-8"), self.rejected.open("a", encoding="utf-8")

    def left(
        self, prompts: Iterable[Prompt], system_prompt: str | None, template_kwargs: Mapping[str, Any]
    ) -> Iterator[Prompt]:
        """The prompts that are not in the file. Raises UserError for one that is there with other questions."""
        for prompt in prompts:
            if prompt.identifier not in self.known:
                yield prompt
            elif found := self.known[prompt.identifier]:
                asked = [*opening(prompt, system_prompt), *(m for asked in prompt.rounds[: found[0]] for m in asked)]
                if found[1] != _hash(asked, prompt.tools, {**template_kwargs, **prompt.template_kwargs}):
                    raise UserError(
                        f"{self.output}: its conversation {prompt.identifier} has other questions than the prompt "
                        f"({prompt.where}): use another output file"
                    )


def _asked_in(record: dict[str, Any]) -> tuple[int, str] | None:
    """See `AnswerFile.known`."""
    if "conversations" not in record or "finish_reasons" not in record:
        return None
    asked = _hash(record["conversations"], record.get("tools"), record.get("chat_template_kwargs"))
    return len(record["finish_reasons"]), asked


def _hash(messages: Iterable[Message], tools: Any, template_kwargs: Any) -> str:
    """Identity of what a conversation asks."""
    asked = json.dumps([questions(messages), tools or None, template_kwargs or {}], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
