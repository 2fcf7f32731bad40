"""A byte-level tokenizer with special tokens, and chat templates of base families."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>", "<end_of_turn>"]

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|start|>system\nBe kind.<|end|>\n{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Adds a default system prompt, but only when there is a first message."""

CHATML_MARKED = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|start|>system\nBe kind.<|end|>\n{% endif %}"
    "<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHATML_MARKED_WITHOUT_END = CHATML_MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")

BRACKETS = (
    "<bos>{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }}<eos>{% endif %}{% endfor %}"
)
"""No header for answers, roles must alternate, content trimmed (as the Llama-2 and Mistral families)."""

HEADER_ALWAYS = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
"""Ignores add_generation_prompt, so the header comes with the answer."""

TURN_AND_DOCUMENT_END = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<eos>{% endif %}"
)
"""Writes the end of the document behind the last turn (as Phi does)."""

FORGETS_THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Removes the reasoning of earlier turns (as reasoning models do)."""

PLAIN_WORDS = (
    "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
"""No special token anywhere."""


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges, with `template`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = template
    return fast


def talk(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """Messages from (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


def write_lines(path: Path, conversations: list[Any]) -> Path:
    """Write a JSON lines file with one conversation (list of messages) per line."""
    lines = [json.dumps({"conversations": messages}, ensure_ascii=False) for messages in conversations]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Limits files to `size` bytes, for any writer, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def slow_to_show(folder: Path, prefix: str = "") -> Iterator[None]:
    """As on a network file system, whatever begins with `prefix` is not found below `folder` before that is listed."""
    listed: list[Path] = []
    is_file, listdir = Path.is_file, os.listdir

    def looked_up(path: Path) -> bool:
        inside = path.is_relative_to(folder) and path.relative_to(folder).parts[0].startswith(prefix)
        return is_file(path) and (folder in listed or not inside)

    def list_folder(path: Any = ".") -> list[Any]:
        listed.append(Path(path))
        return listdir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_file", looked_up)
        patch.setattr(os, "listdir", list_folder)
        yield
