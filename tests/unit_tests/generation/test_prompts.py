"""Question files, chat files, stop tokens, dialogues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.generation.prompts import Dialogue, Prompt, check_stop_ids, read_prompts
from tests.unit_tests.decoding import tiny_models


def _write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def _said(prompt: Prompt) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in r] for r in prompt.rounds]


def test_question_files(tmp_path: Path) -> None:
    path = tiny_models.write_questions(tmp_path / "mt.jsonl")
    found = read_prompts(path)
    assert [p.identifier for p in found] == ["mt-1", "mt-2", "mt-7", "mt-9", "mt-10"]
    assert [p.category for p in found] == ["math", "math", "none", "none", "qa"]
    assert _said(found[2]) == [[("user", "Hello.")], [("user", "Goodbye.")]]
    assert found[2].where == f"{path} line 3"
    assert [p.identifier for p in read_prompts(path, limit=2)] == ["mt-1", "mt-2"]


def test_chat_files_keep_everything_but_answers(tmp_path: Path) -> None:
    u, a, s = ({"role": r, "content": "x"} for r in ("user", "assistant", "system"))
    path = _write(
        tmp_path / "chat.jsonl",
        {"conversation_id": "c1", "messages": [s, u, a, u, a]},
        {"id": "c2", "conversations": [{"from": "human", "value": "hey"}]},
        {"conversations": [a, u, a], "category": "greeting"},
    )
    found = read_prompts(path)
    assert [p.identifier for p in found] == ["c1", "c2", "chat-3"]
    assert _said(found[0]) == [[("system", "x"), ("user", "x")], [("user", "x")]]
    assert _said(found[1]) == [[("user", "hey")]]
    assert _said(found[2]) == [[("assistant", "x"), ("user", "x")]]
    assert found[2].category == "greeting"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "contains no prompts"),
        (["{"], "line 1: malformed JSON"),
        (["[1]"], "line 1: found a JSON list"),
        ([{"turns": []}], "line 1: found turns"),
        ([{"turns": ["a", " "]}], "line 1: found turns"),
        ([{"question_id": 1, "turns": ["a"]}, {"question_id": 1, "turns": ["b"]}], "line 2: identifier 'p-1' was used"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], "tool turns"),
        ([{"messages": [{"role": "system", "content": "x"}]}], "no user message"),
        ([{"prompt": "x"}], "line 1: found keys prompt"),
        ([{"turns": ["a"], "messages": [{"role": "user", "content": "x"}]}], "line 1: found turns and messages"),
        ([{"turns": ["a"], "id": "x"}, {"turns": ["b"], "conversation_id": "x"}], "line 2: identifier 'x' was used"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(_write(tmp_path / "p.jsonl", *records))


def test_an_identifier_of_null_is_none(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "x"}]
    lines = [
        {"conversation_id": None, "messages": said}, {"conversation_id": None, "messages": said},
        {"conversation_id": None, "id": 0, "messages": said}, {"id": None, "turns": ["x"]}, {"id": "q", "turns": ["x"]},
    ]  # fmt: skip
    found = read_prompts(_write(tmp_path / "p.jsonl", *lines))
    assert [p.identifier for p in found] == ["p-1", "p-2", "0", "p-4", "q"]


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_no_stop_token_is_refused() -> None:
    check_stop_ids({3})
    with pytest.raises(UserError, match="no stop token"):
        check_stop_ids(set())


def test_dialogue_renders_history_with_the_tokenizers_template() -> None:
    tokenizer = tiny_models.chat_tokenizer()
    encoder = ChatEncoder(tokenizer)
    prompt = Prompt("p", "none", (({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)))
    dialogue = Dialogue(prompt)
    start = "<|start|>system\nBe kind.<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(dialogue.ask(encoder, 256)) == start
    first_seed = dialogue.seed(0)
    dialogue.take([*tokenizer("yes", add_special_tokens=False).input_ids, 1], True, tokenizer)
    assert dialogue.waits and not dialogue.truncated and dialogue.seed(0) != first_seed
    again = f"{start}yes<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(dialogue.ask(encoder, 256)) == again
    dialogue.take(tokenizer("so", add_special_tokens=False).input_ids, False, tokenizer)
    assert not dialogue.waits and dialogue.truncated
    assert [m["content"] for m in dialogue.messages] == ["a", "yes", "b", "so"]


def test_dialogue_ends_at_a_truncated_empty_or_impossible_round() -> None:
    tokenizer = tiny_models.chat_tokenizer()
    encoder = ChatEncoder(tokenizer)
    prompt = Prompt("p", "none", (({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)))
    cut, silent, long = Dialogue(prompt), Dialogue(prompt), Dialogue(prompt)
    cut.take([80], False, tokenizer)
    assert not cut.waits and cut.truncated and len(cut.messages) == 2
    silent.take([1], True, tokenizer)
    assert not silent.waits and "empty answer" in silent.problem and silent.messages == []
    assert long.ask(encoder, 20) is None
    assert not long.waits and "the context holds 20" in long.problem
