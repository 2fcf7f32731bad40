"""Answers on disk: correct, flagged, and resumed after a kill."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.conversations import read_conversations
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.engine import decode
from megatron_spec.generation import synthesize as module
from megatron_spec.generation.outputs import read_records
from megatron_spec.generation.prompts import Dialogue, Prompt
from megatron_spec.generation.synthesize import synthesize, synthesize_to_file
from tests.unit_tests.data.chat_fixtures import disk_of
from tests.unit_tests.decoding.tiny_models import CHAT_CONFIG


@pytest.fixture(scope="module")
def records(chat: Any) -> dict[str, dict[str, Any]]:
    found = synthesize(chat.base, chat.tokenizer, chat.prompts, CHAT_CONFIG, stop_ids=chat.stop_ids)
    return {r["conversation_id"]: r for batch in found for r in batch}


def test_answers_equal_the_base(chat: Any, records: dict[str, dict[str, Any]]) -> None:
    assert set(records) == {p.identifier for p in chat.prompts}
    flags = [records[p.identifier]["truncated"] for p in chat.prompts]
    assert True in flags and False in flags
    for prompt in chat.prompts:
        record, history = records[prompt.identifier], []
        for i, message in enumerate(record["conversations"]):
            if message["role"] == "assistant":
                ids = chat.tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
                [answer] = decode(chat.base, [ids], CHAT_CONFIG, chat.stop_ids)
                tokens = answer.tokens[:-1] if answer.stopped else answer.tokens
                assert message["content"] == chat.tokenizer.decode(tokens, skip_special_tokens=True)
                last = i == len(record["conversations"]) - 1
                assert record["truncated"] == (not answer.stopped) or not last
            history.append(message)
        users = [m["content"] for m in history if m["role"] == "user"]
        asked = [m["content"] for r in prompt.rounds for m in r]
        assert users == asked[: len(users)] and (users == asked or record["truncated"])
    assert any(len(r["conversations"]) == 4 for r in records.values())


def test_drafting_does_not_change_the_answers(chat: Any, records: dict[str, dict[str, Any]]) -> None:
    found = synthesize(
        chat.base, chat.tokenizer, chat.prompts, CHAT_CONFIG, stop_ids=chat.stop_ids, draft=NGramDrafter()
    )
    assert {r["conversation_id"]: r for batch in found for r in batch} == records


def test_temperature_is_seeded_by_conversation(chat: Any) -> None:
    def run(prompts: list[Prompt], seed: int) -> dict[str, Any]:
        config = CHAT_CONFIG.replace(temperature=1.0, seed=seed)
        found = synthesize(chat.base, chat.tokenizer, prompts, config, stop_ids=chat.stop_ids)
        return {r["conversation_id"]: r for batch in found for r in batch}

    first = run(chat.prompts, 1)
    assert run(chat.prompts[::-1][:2], 1) == {p.identifier: first[p.identifier] for p in chat.prompts[::-1][:2]}
    assert run(chat.prompts, 2) != first


def _to_file(
    chat: Any, prompts: list[Prompt], output: Path, about: dict[str, Any] | None = None, **changes: Any
) -> int:
    config = CHAT_CONFIG.replace(**changes)
    return synthesize_to_file(chat.base, chat.tokenizer, prompts, config, output, stop_ids=chat.stop_ids, about=about)


def test_file_is_in_the_order_of_the_prompts_and_readable(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "deep" / "out.jsonl"
    assert _to_file(chat, chat.prompts, output) == 5
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [records[p.identifier] for p in chat.prompts]
    assert [c.identifier for c in read_conversations(output)] == [p.identifier for p in chat.prompts]
    meta = output.with_name("out.jsonl.meta.json")
    assert sorted(output.parent.iterdir()) == [output, meta]  # no parts, no temporaries
    before = output.read_bytes()
    assert _to_file(chat, chat.prompts, output) == 0
    assert output.read_bytes() == before


def test_full_disk_is_a_user_error_and_a_rerun_goes_on(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with disk_of(600), pytest.raises(UserError, match=r"out.jsonl.part0 cannot be written: larger than a file may be"):
        _to_file(chat, chat.prompts, output)
    assert not output.exists()
    assert 0 < _to_file(chat, chat.prompts, output) <= len(chat.prompts)
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        records[p.identifier] for p in chat.prompts
    ]


def test_a_prompt_that_the_template_refuses_stops_no_other(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(chat.tokenizer)
    check = "{% if 'forbidden' in messages[-1].content %}{{ raise_exception('no such word') }}{% endif %}"
    tokenizer.chat_template = check + tokenizer.chat_template
    first = chat.prompts[0]
    refused = dataclasses.replace(first, identifier="refused", rounds=(({"role": "user", "content": "forbidden"},),))
    output = tmp_path / "out.jsonl"
    changed = SimpleNamespace(base=chat.base, tokenizer=tokenizer, stop_ids=chat.stop_ids)
    assert _to_file(changed, [chat.prompts[0], refused, *chat.prompts[1:]], output) == 5
    assert read_records(output) == records
    rejected = read_records(output.with_name("out.jsonl.rejected"))
    assert list(rejected) == ["refused"] and "no such word" in rejected["refused"]["problem"]
    with pytest.raises(UserError, match="no such word"):
        _to_file(changed, [refused], tmp_path / "none.jsonl")


def test_killed_run_resumes(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    real = module._record
    count = 0

    def dies_at_the_fourth(*args: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "_record", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        _to_file(chat, chat.prompts, output)
    monkeypatch.setattr(module, "_record", real)
    part = tmp_path / "out.jsonl.part0"
    assert len(read_records(part)) == 3 and not output.exists()  # each answer was on disk at once
    part.write_bytes(part.read_bytes()[:-10])  # and the kill came in the middle of the third line
    assert len(read_records(part)) == 2
    assert _to_file(chat, chat.prompts, output) == 3
    assert list(read_records(output).values()) == [records[p.identifier] for p in chat.prompts]
    assert not part.exists()


def test_memory_does_not_grow_with_the_number_of_prompts(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dialogues, which hold token ids, exist for two windows at most, and the merge reads one line at a time."""
    alive: list[weakref.ref[Dialogue]] = []
    most = 0

    class Counted(Dialogue):
        def __init__(self, prompt: Prompt) -> None:
            nonlocal most
            super().__init__(prompt)
            alive.append(weakref.ref(self))
            gc.collect()
            most = max(most, sum(dialogue() is not None for dialogue in alive))

    monkeypatch.setattr(module, "Dialogue", Counted)
    monkeypatch.setattr(module, "WINDOW", 2)
    first, output = chat.prompts[0], tmp_path / "out.jsonl"
    prompts = [dataclasses.replace(first, identifier=f"{i}", rounds=first.rounds[:1]) for i in range(12)]
    assert _to_file(chat, prompts, output, batch_size=1, max_new_tokens=2) == 12
    assert list(read_records(output)) == [p.identifier for p in prompts]
    assert len(alive) == 12 and most <= 9, "two windows of four, and one that was just answered"


def test_parts_of_another_layout_are_used_and_new_prompts_added(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert _to_file(chat, chat.prompts[:1], output) == 1
    other = records[chat.prompts[3].identifier]
    (tmp_path / "out.jsonl.part5").write_text(json.dumps(other) + '\nnonsense\n{"half', encoding="utf-8")
    assert _to_file(chat, chat.prompts, output) == 3
    assert list(read_records(output).values()) == [records[p.identifier] for p in chat.prompts]


def test_unanswerable_prompts_are_skipped_and_named(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    huge = Prompt("huge", "none", (({"role": "user", "content": "x" * 300},),))
    assert _to_file(chat, [huge, *chat.prompts[:1]], output) == 1
    assert list(read_records(output)) == [chat.prompts[0].identifier]
    assert "huge: round 0 has" in caplog.text and "1 prompts got no answer" in caplog.text
    rejected = tmp_path / "out.jsonl.rejected"
    assert "round 0 has" in read_records(rejected)["huge"]["problem"]
    assert _to_file(chat, [*chat.prompts[:2]], output) == 1 and list(read_records(rejected)) == ["huge"]


def test_no_answer_at_all_is_an_error_and_leaves_no_output(chat: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    huge = [Prompt(f"huge {i}", "none", (({"role": "user", "content": "x" * 300},),), f"p line {i}") for i in (1, 2)]
    with pytest.raises(UserError, match=r"none of 2 prompts could be answered, the first \(p line 1\): round 0 has"):
        _to_file(chat, huge, output)
    assert not output.exists() and len(read_records(tmp_path / "out.jsonl.rejected")) == 2


def test_truncated_answers_and_later_questions_are_counted(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _to_file(chat, chat.prompts, tmp_path / "out.jsonl", max_new_tokens=2)
    lines = list(read_records(tmp_path / "out.jsonl").values())
    early = [r for r in lines if r.get("problem")]
    assert early and all(r["truncated"] and "cut at 2 tokens" in r["problem"] for r in early)
    assert f"{len(early)} of them were cut before their last question" in caplog.text
    assert all(len(r["answer_ids"]["turns"][-1]) == 2 for r in lines if r["truncated"])


def test_the_file_trains_on_the_tokens_of_the_base(
    chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    from megatron_spec.data.loader import ConversationDataset

    output = tmp_path / "out.jsonl"
    _to_file(chat, chat.prompts, output)
    data = ConversationDataset(output, chat.tokenizer, 10**6, chat.stop_ids, vocab_size=chat.base.vocab_size)
    checked = 0
    for sample in (data[i] for i in range(len(data))):
        tokens, turns = sample.tokens.tolist(), sample.turns.tolist()
        for turn in sorted(set(turns) - {0}):
            begin, count = turns.index(turn), turns.count(turn)
            [answer] = decode(chat.base, [tokens[:begin]], CHAT_CONFIG, chat.stop_ids)
            assert answer.tokens == tokens[begin : begin + count]  # the base says it again
            checked += 1
    assert checked == sum(m["role"] == "assistant" for r in records.values() for m in r["conversations"])


def test_rerun_with_other_settings_is_refused(chat: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    asked = [chat.prompts[0], chat.prompts[4]]
    assert _to_file(chat, asked, output, {"base_fingerprint": "a"}) == 2
    before = output.read_bytes()
    assert _to_file(chat, asked, output, {"base_fingerprint": "a"}, batch_size=1, seed=5, max_draft_len=1) == 0
    for about, changes, message in (
        ("b", {}, "base_fingerprint: found 'a', now 'b'"),
        ("a", {"max_new_tokens": 13}, "max_new_tokens: found 12, now 13"),
        ("a", {"temperature": 0.5}, "temperature: found 0.0, now 0.5; seed: found None, now 0"),
    ):
        with pytest.raises(UserError, match=message):
            _to_file(chat, asked, output, {"base_fingerprint": about}, **changes)
    for change in (
        {"rounds": (({"role": "user", "content": "What is 2 + 3?"},),)},
        {"template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
    ):
        other = dataclasses.replace(asked[0], **change)
        with pytest.raises(UserError, match=f"1 conversations answer other questions .*{other.identifier}"):
            _to_file(chat, [other, asked[1]], output, {"base_fingerprint": "a"})
    output.with_name("out.jsonl.meta.json").unlink()
    with pytest.raises(UserError, match=r"meta\.json, .* is missing"):
        _to_file(chat, asked, output, {"base_fingerprint": "a"})
    assert output.read_bytes() == before


def test_options_that_are_left_out_are_other_settings(chat: Any, tmp_path: Path) -> None:
    """They are recorded only where they are given: `top_k`, `rejections`, ..."""
    output = tmp_path / "out.jsonl"
    about = {"base_fingerprint": "a", "top_k": 5}
    assert _to_file(chat, chat.prompts[:1], output, about) == 1
    with pytest.raises(UserError, match=r"other settings \(top_k: found 5, now None\)"):
        _to_file(chat, chat.prompts[:2], output, {"base_fingerprint": "a"})
    settings = {**json.loads(output.with_name("out.jsonl.meta.json").read_text())}
    del settings["base_fingerprint"]
    assert len(module.check_output(output, chat.prompts, settings)) == 1  # a Megatron checkpoint is not hashed yet


def test_unrelated_files_are_not_overwritten(chat: Any, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("do not lose me\n", encoding="utf-8")
    for output, message in ((thesis, "thesis.tex already exists"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=message):
            _to_file(chat, chat.prompts[:1], output)
    assert thesis.read_text(encoding="utf-8") == "do not lose me\n" and list(tmp_path.iterdir()) == [thesis]


def test_an_output_may_have_any_name(chat: Any, tmp_path: Path) -> None:
    """Its parts are found, and nothing else is."""
    output, mine = tmp_path / "out[1].jsonl", tmp_path / "out[1].jsonl.part_of_mine"
    mine.write_text("do not lose me\n", encoding="utf-8")
    assert _to_file(chat, chat.prompts[:1], output) == 1
    assert len(read_records(output)) == 1
    names = {output.name, f"{output.name}.meta.json", mine.name}
    assert {path.name for path in tmp_path.iterdir()} == names and mine.read_text(encoding="utf-8")


def test_rejections_are_those_of_the_draft(chat: Any, records: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Every answer has the places of its own decoding; other options of drafting need another file."""
    options: dict[str, Any] = {
        "stop_ids": chat.stop_ids,
        "draft": NGramDrafter(is_public_pool=False),
        "save_rejections": True,
    }
    output, about = tmp_path / "out.jsonl", {"rejections": {"load": "one"}}
    config = CHAT_CONFIG.replace(batch_size=1)
    synthesize_to_file(chat.base, chat.tokenizer, chat.prompts, config, output, about=about, **options)
    found, places = read_records(output), []
    for name, record in found.items():
        rejected = record.pop("rejected")["turns"]
        assert record == records[name]
        history: list[dict[str, str]] = []
        answers = iter(rejected)
        for message in record["conversations"]:
            if message["role"] == "assistant":
                ids = chat.tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
                [alone] = decode(chat.base, [ids], config, chat.stop_ids, draft=NGramDrafter(is_public_pool=False))
                places.append((next(answers), alone.rejected))
            history.append(message)
        assert next(answers, None) is None
    assert all(mine == alone for mine, alone in places) and any(mine for mine, _ in places)
    with pytest.raises(UserError, match="answered with other settings"):
        synthesize_to_file(
            chat.base, chat.tokenizer, chat.prompts, config, output, about={"rejections": {"load": "two"}}, **options
        )
