"""Loss masks under a chat template in the style of every base family, against readable golden files.

In golden/*.txt supervised text is in brackets: each assistant turn with its end token, without the header.
After a change, `MEGATRON_SPEC_WRITE_GOLDEN=1 pytest THIS_FILE` writes them; read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder, Sample
from megatron_spec.data.conversations import parse_conversation
from tests.unit_tests.data.chat_fixtures import make_tokenizer

HERE = Path(__file__).parent
TEMPLATES = ("llama3", "llama3_marked", "mistral", "phi3", "qwen2", "qwen3", "gpt_oss", "deepseek")
SPECIAL = (
    "<|head|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|tool|>", "<|User|>", "<|Assistant|>", "<|Tool|>", "[INST]", "[/INST]", "[TOOL]", "[/TOOL]", "[CALL]",
)  # fmt: skip
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<eos>")
CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}]
USER, ASSISTANT = {"role": "user"}, {"role": "assistant"}
TALKS: dict[str, dict[str, Any]] = {
    "multi-turn": {"messages": [
        {**USER, "content": "One?"}, {**ASSISTANT, "content": "Two."},
        {**USER, "content": "Three?"}, {**ASSISTANT, "content": "Four, ünd é."}]},
    "system": {"messages": [
        {"role": "system", "content": "Be brief."}, {**USER, "content": "Hi"}, {**ASSISTANT, "content": "Hello"}]},
    "tools": {"tools": [{"name": "sum"}], "messages": [
        {**USER, "content": "Add."}, {**ASSISTANT, "content": None, "tool_calls": CALL},
        {"role": "tool", "content": "3"}, {**ASSISTANT, "content": "It is 3."}]},
    "assistant first": {"messages": [
        {**ASSISTANT, "content": "Welcome."}, {**USER, "content": "Thanks"}, {**ASSISTANT, "content": "Ask."}]},
    "reasoning": {"messages": [
        {**USER, "content": "One?"}, {**ASSISTANT, "content": "Two.", "reasoning_content": "first thought"},
        {**USER, "content": "Three?"}, {**ASSISTANT, "content": "Four.", "reasoning_content": "second thought"}]},
    "thinks the very words": {"messages": [
        {**USER, "content": "One?"}, {**ASSISTANT, "content": "Two.", "reasoning_content": "Two. Say Two."}]},
    "same words twice": {"messages": [
        {**USER, "content": "yes"}, {**ASSISTANT, "content": "yes"},
        {**USER, "content": "yes"}, {**ASSISTANT, "content": "yes"}]},
}  # fmt: skip


def encoder(template: str) -> ChatEncoder:
    tokenizer = make_tokenizer((HERE / "templates" / f"{template}.jinja").read_text(encoding="utf-8").rstrip("\n"))
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL], special_tokens=True)
    return ChatEncoder(tokenizer, [tokenizer.convert_tokens_to_ids(t) for t in ENDS])


def shown(found: ChatEncoder, sample: Sample) -> str:
    """The text, supervised turns in brackets."""
    text, before, start = "", 0, 0
    turns = [*sample.turns.tolist(), 0]
    for i, turn in enumerate(turns):
        if turn != before:
            text += found.tokenizer.decode(sample.tokens[start:i]) + ("⟧" if before else "") + ("⟦" if turn else "")
            before, start = turn, i
    return text + found.tokenizer.decode(sample.tokens[start:])


def masks(template: str) -> str:
    """Contents of a golden file."""
    found = encoder(template)
    parts = []
    for name, record in TALKS.items():
        try:
            text = shown(found, found.encode(parse_conversation(record, name)))
        except UserError as error:
            text = f"refused: {error}"
        parts.append(f"==== {name}\n{text}\n")
    return "".join(parts)


@pytest.mark.parametrize("template", TEMPLATES)
def test_masks(template: str) -> None:
    path = HERE / "golden" / f"{template}.txt"
    text = masks(template)
    if os.environ.get("MEGATRON_SPEC_WRITE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TALKS)
def test_marks_and_incremental_rendering_agree(name: str) -> None:
    marked, plain = encoder("llama3_marked"), encoder("llama3_marked")
    talk = parse_conversation(TALKS[name], name)
    assert marked.uses_marks
    plain.uses_marks = False
    assert shown(marked, marked.encode(talk)) == shown(plain, plain.encode(talk))
    assert shown(marked, marked.encode(talk)) == shown(encoder("llama3"), encoder("llama3").encode(talk))
