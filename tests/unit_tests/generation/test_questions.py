"""Questions written by the base: equal in every layout, distinct, resumed after a kill."""

import json
import re
import zlib
from collections import Counter
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.tokenizer import special_ids
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.step import DeviceSteps
from megatron_spec.generation import questions
from megatron_spec.generation.questions import draw_questions, write_questions
from megatron_spec.runtime import platform
from tests.unit_tests.data.chat_fixtures import BRACKETS, CHATML, make_tokenizer
from tests.unit_tests.decoding.tiny_models import CHAT_CONFIG

CONFIG = CHAT_CONFIG.replace(temperature=1.5, seed=3)


def drawn(chat, numbers: range, config) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    for some in draw_questions(chat.base, ChatEncoder(chat.tokenizer), numbers, config, chat.stop_ids):
        found |= some
    return found


def test_header_is_the_text_before_the_user_message():
    for template, expected in (
        (CHATML, "<|start|>system\nBe kind.<|end|>\n<|start|>user\n"),
        (BRACKETS, "<bos>[INST]"),
    ):
        tokenizer = make_tokenizer(template)
        assert tokenizer.decode(ChatEncoder(tokenizer).question_ids(), skip_special_tokens=False) == expected


def test_questions_are_distinct_and_independent_of_the_batch(chat, tmp_path):
    draws = drawn(chat, range(60), CONFIG)
    assert list(draws) == list(range(60)) and None in draws.values()
    draws = {number: text for number, text in draws.items() if text}
    assert 10 < len(draws) < 60 and all(text.strip() == text for text in draws.values())
    expected = []
    for number in draws:
        if " ".join(draws[number].casefold().split()) not in {" ".join(t.casefold().split()) for t in expected}:
            expected.append(draws[number])
    found = {}
    for batch in (2, 5):
        path = tmp_path / f"{batch}.jsonl"
        config = CONFIG.replace(batch_size=batch)
        prompts = write_questions(chat.base, chat.tokenizer, 8, config, path, chat.stop_ids)
        assert [p.rounds[0][0]["content"] for p in prompts] == expected[:8]
        found[batch] = path.read_bytes()
    assert found[2] == found[5]


def test_a_draw_is_what_the_base_says_alone(chat):
    """With its seed, however rows are refilled, and wherever a call of the engine ends."""
    header, found = ChatEncoder(chat.tokenizer).question_ids(), drawn(chat, range(30), CONFIG.replace(batch_size=4))
    ends = chat.stop_ids | special_ids(chat.tokenizer)
    for number, text in found.items():
        seed = zlib.crc32(f"question:3:{number}".encode())
        [alone] = decode(chat.base, [header], CONFIG, ends, seeds=[seed])
        said = chat.tokenizer.decode(alone.tokens[:-1], skip_special_tokens=True).strip()
        assert text == (said if alone.stopped else None)
    assert list(drawn(chat, range(7, 30), CONFIG).items()) == list(found.items())[7:]


def test_streams_and_windows_do_not_change_the_draws(chat, monkeypatch):
    whole = drawn(chat, range(150), CONFIG.replace(batch_size=16))
    monkeypatch.setattr(questions, "STREAM", 40)
    assert list(drawn(chat, range(150), CONFIG.replace(batch_size=16)).items()) == list(whole.items())


def test_rows_are_refilled_while_long_draws_run(chat, monkeypatch):
    """Nearly every row of every step is in use, and the header is read once."""
    calls = Counter()

    def counted(name):
        real = getattr(DeviceSteps, name)
        monkeypatch.setattr(DeviceSteps, name, lambda self, *a: calls.update([name]) or real(self, *a))

    for name in ("verify", "prefill", "read_common", "begin"):
        counted(name)
    config = CONFIG.replace(batch_size=16)
    real = questions._Draws._text
    monkeypatch.setattr(questions._Draws, "_text", lambda self, t: calls.update(tokens=len(t)) or real(self, t))
    found = drawn(chat, range(400), config)
    tokens = calls["tokens"] + 12 * sum(text is None for text in found.values())
    assert calls["read_common"] == 1 and calls["prefill"] == 0
    assert tokens - 400 > 0.85 * 16 * calls["verify"]  # the first token of a draw takes no step


def test_what_became_of_the_draws_is_said(chat, tmp_path, caplog):
    with caplog.at_level("INFO"):
        write_questions(chat.base, chat.tokenizer, 20, CONFIG, tmp_path / "q.jsonl", chat.stop_ids, rows=3)
    [said] = [r.getMessage() for r in caplog.records if "did not end within 12 tokens" in r.getMessage()]
    draws, new, repeated, cut, empty = map(int, re.findall(r"\d+", said.replace("within 12", "")))
    last = json.loads((tmp_path / "q.jsonl").read_text().splitlines()[-1])["conversation_id"]
    found = drawn(chat, range(draws), CONFIG)
    assert draws == new + repeated + cut + empty == int(last.removeprefix("draw-")) + 1 and new == 20
    assert cut == sum(text is None for text in found.values()) and empty == sum(text == "" for text in found.values())


def test_killed_run_resumes_and_other_settings_are_refused(chat, tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "q.jsonl"
    config = CONFIG.replace(batch_size=2)
    write_questions(chat.base, chat.tokenizer, 8, config, whole, chat.stop_ids)
    write_questions(chat.base, chat.tokenizer, 3, config, path, chat.stop_ids)
    first = json.loads(path.read_text().splitlines()[-1])["conversation_id"]
    with path.open("ab") as file:  # the kill came while a line was written
        file.write(b'{"conversation_id": "draw-9999", "tu')
    real, ranges = questions.draw_questions, []
    monkeypatch.setattr(questions, "draw_questions", lambda b, t, r, *a: ranges.append(r) or real(b, t, r, *a))
    write_questions(chat.base, chat.tokenizer, 8, config, path, chat.stop_ids)
    assert path.read_bytes() == whole.read_bytes()
    assert ranges[0].start == int(first.removeprefix("draw-")) + 1
    with pytest.raises(UserError, match=r"other settings \(seed: found 3, now 4\)"):
        write_questions(chat.base, chat.tokenizer, 8, config.replace(seed=4), path, chat.stop_ids)
    with pytest.raises(UserError, match=r"--question-temperature: expected a number greater than 0"):
        write_questions(chat.base, chat.tokenizer, 8, config.replace(temperature=0.0), path, chat.stop_ids)
    path.write_bytes(b'{"conversation_id": "mine", "turns": ["a"]}\n' + path.read_bytes())
    with pytest.raises(UserError, match=r"q.jsonl line 1 is not a drawn question: use another output file"):
        write_questions(chat.base, chat.tokenizer, 8, config, path, chat.stop_ids)


def test_repetitive_base_ends_with_a_warning(chat, tmp_path, monkeypatch, caplog):
    def same(base, encoder, numbers, *args):
        """Two questions."""
        yield {n: f"Same {n % 2}" for n in numbers}

    monkeypatch.setattr(questions, "draw_questions", same)
    found = write_questions(chat.base, chat.tokenizer, 5, CONFIG, tmp_path / "q.jsonl", chat.stop_ids)
    assert len(found) == 2 and "2 distinct questions instead of 5" in caplog.text
    monkeypatch.setattr(questions, "draw_questions", lambda *a: (d for d in [{0: "", 1: None}]))
    with pytest.raises(UserError, match=r"the base asked nothing"):
        write_questions(chat.base, chat.tokenizer, 5, CONFIG, tmp_path / "none.jsonl", chat.stop_ids)


def generated(folder: str, layouts: list) -> list:
    from megatron.core import parallel_state

    from megatron_spec.commands.decode import generate
    from megatron_spec.config import ParallelConfig

    found = []
    for i, layout in enumerate(layouts):
        output = f"{folder}/{i}-{len(layouts)}.jsonl"
        generate(None, output, base=folder, synthesize=6, decode=CHAT_CONFIG, parallel=ParallelConfig(**layout))
        found.append([json.loads(line) for line in Path(output).read_text(encoding="utf-8").splitlines()])
        if len(layouts) > 1:
            parallel_state.destroy_model_parallel()
    return found


def test_other_settings_are_refused_before_any_weight_is_read(chat, tmp_path, monkeypatch):
    from megatron_spec.commands import decode, decode_inputs

    output, base = str(tmp_path / "out.jsonl"), str(chat.folder)
    decode.generate(None, output, base=base, synthesize=2, decode=CHAT_CONFIG)
    asked = Path(f"{output}.questions.jsonl")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(decode, "load_models", lambda *_: pytest.fail("the weights were read"))

    def refused(message: str, **changes: object) -> None:
        given = {"base": base, "data": str(asked), "decode": CHAT_CONFIG, **changes}
        with pytest.raises(UserError, match=message):
            decode.generate(given.pop("data"), output, **given)

    refused("max_new_tokens: found", decode=CHAT_CONFIG.replace(max_new_tokens=7))
    refused("dtype: found 'float32', now 'bfloat16'", bf16=True)
    asked.write_text(asked.read_text(encoding="utf-8").replace('"turns": ["', '"turns": ["really, '), encoding="utf-8")
    refused("answer other questions")
    asked.write_bytes(before[asked])
    Path(output).unlink()
    refused("temperature: found 1.0, now 0.5", data=None, synthesize=2, question_temperature=0.5)
    refused("dtype: found 'float32', now 'bfloat16'", data=None, synthesize=2, bf16=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_inputs, "load_tokenizer", lambda *_: make_tokenizer("{{ messages[0].content }}<|end|>"))
        patch.setattr(decode, "check_questions", lambda *_: {})
        refused("writes nothing before a user's text", data=None, synthesize=2)
    refused("--question-batch-size is for --synthesize", question_batch_size=3)
    refused("expected a number greater than 0", data=None, synthesize=2, question_temperature=0.0)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == {p: b for p, b in before.items() if p.name != "out.jsonl"}


def test_prompts_and_made_up_questions_together(chat, tmp_path, monkeypatch):
    """The same answers as apart, and a killed run goes on; made-up identifiers are not for prompts."""
    from megatron_spec.commands import decode

    def answers(name: str, data: str | None, **given: object) -> dict[str, object]:
        decode.generate(data, str(tmp_path / name), base=str(chat.folder), decode=CHAT_CONFIG, **given)
        lines = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        return {line["conversation_id"]: line["conversations"] for line in lines}

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"conversation_id": "mine", "turns": ["red sky"]}\n', encoding="utf-8")
    mine, made_up = answers("mine.jsonl", str(prompts)), answers("made.jsonl", None, synthesize=3)
    both = answers("both.jsonl", str(prompts), synthesize=3)
    assert both == mine | made_up and len(both) == 4
    output = tmp_path / "both.jsonl"
    output.write_text("".join(output.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    assert answers("both.jsonl", str(prompts), synthesize=3) == both
    monkeypatch.setattr(decode, "load_models", lambda *_: pytest.fail("the weights were read"))
    prompts.write_text('{"conversation_id": "draw-1", "turns": ["red sky"]}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"prompts.jsonl line 1: identifier 'draw-1' is reserved"):
        answers("other.jsonl", str(prompts), synthesize=3)


def test_a_gpu_draws_as_many_as_its_memory_allows(chat, monkeypatch):
    """One sixteenth of it, and 1,024 at most; the batch size at least."""
    config = CONFIG.replace(batch_size=24)
    each = chat.base.cache_bytes(20 + 12 + 1) + 16 * chat.base.vocab_size
    cache = chat.base.new_cache(3, 33)
    assert 3 * chat.base.cache_bytes(33) == cache.keys.nbytes + cache.values.nbytes
    for memory, rows in (
        (float("inf"), 24),
        (16 * 1e9, 768),
        (16.0 * 192 * each, 192),
        (16.0 * 191 * each, 96),
        (1.0, 24),
    ):
        monkeypatch.setattr(platform, "device_memory", lambda memory=memory: memory)
        assert questions.rows_of(chat.base, config, 20) == rows
