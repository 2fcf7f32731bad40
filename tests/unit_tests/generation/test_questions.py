"""Questions written by the base: equal in every layout, distinct, resumed after a kill."""

import json
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.generation import questions
from megatron_spec.generation.questions import draw_questions, write_questions
from tests.unit_tests.data.chat_fixtures import BRACKETS, CHATML, make_tokenizer
from tests.unit_tests.decoding.tiny_models import CHAT_CONFIG

CONFIG = CHAT_CONFIG.replace(temperature=1.5, seed=3)


def test_header_is_the_text_before_the_user_message():
    for template, expected in (
        (CHATML, "<|start|>system\nBe kind.<|end|>\n<|start|>user\n"),
        (BRACKETS, "<bos>[INST]"),
    ):
        tokenizer = make_tokenizer(template)
        assert tokenizer.decode(ChatEncoder(tokenizer).question_ids(), skip_special_tokens=False) == expected


def test_questions_are_distinct_and_independent_of_the_batch(chat, tmp_path):
    draws = draw_questions(chat.base, ChatEncoder(chat.tokenizer), range(60), CONFIG, chat.stop_ids)
    assert 10 < len(draws) <= 60 and all(text.strip() == text != "" for text in draws.values())
    expected = []
    for number in sorted(draws):
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


def test_killed_run_resumes_and_other_settings_are_refused(chat, tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "q.jsonl"
    config = CONFIG.replace(batch_size=2)
    write_questions(chat.base, chat.tokenizer, 8, config, whole, chat.stop_ids)
    write_questions(chat.base, chat.tokenizer, 3, config, path, chat.stop_ids)
    first = json.loads(path.read_text().splitlines()[-1])["conversation_id"]
    real, ranges = questions.draw_questions, []
    monkeypatch.setattr(questions, "draw_questions", lambda b, t, r, *a: ranges.append(r) or real(b, t, r, *a))
    write_questions(chat.base, chat.tokenizer, 8, config, path, chat.stop_ids)
    assert path.read_bytes() == whole.read_bytes()
    assert ranges[0].start == int(first.removeprefix("draw-")) + 1
    with pytest.raises(UserError, match=r"other settings \(seed: found 3, now 4\)"):
        write_questions(chat.base, chat.tokenizer, 8, config.replace(seed=4), path, chat.stop_ids)
    with pytest.raises(UserError, match=r"--question-temperature: expected a number greater than 0"):
        write_questions(chat.base, chat.tokenizer, 8, config.replace(temperature=0.0), path, chat.stop_ids)


def test_repetitive_base_ends_with_a_warning(chat, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(questions, "draw_questions", lambda b, t, numbers, *a: {n: f"Same {n % 2}" for n in numbers})
    found = write_questions(chat.base, chat.tokenizer, 5, CONFIG, tmp_path / "q.jsonl", chat.stop_ids)
    assert len(found) == 2 and "2 distinct questions instead of 5" in caplog.text
    monkeypatch.setattr(questions, "draw_questions", lambda *a: {})
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
    from megatron_spec.commands import decode

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
    refused("expected a number greater than 0", data=None, synthesize=2, question_temperature=0.0)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == {p: b for p, b in before.items() if p.name != "out.jsonl"}
