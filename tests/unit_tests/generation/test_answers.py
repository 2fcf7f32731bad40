"""Training on a line of generate.py uses the generated tokens, whatever the chat template does to the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import parse_conversation
from megatron_spec.generation.answers import answer_message
from megatron_spec.generation.prompts import Dialogue, Prompt
from megatron_spec.generation.synthesize import _records
from tests.unit_tests.data import chat_fixtures as chats

OSS = (Path(__file__).parents[1] / "data" / "templates" / "gpt_oss.jinja").read_text(encoding="utf-8").rstrip("\n")
OPENS_THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
"""Asks for answers with <think>, and writes none of the reasoning afterwards (as DeepSeek-R1's)."""
QUESTIONS = ({"role": "user", "content": "5*5?"},), ({"role": "user", "content": "And 6*6?"},)
ANALYSIS = "<|channel|>analysis<|message|>Five fives.<|end|><|start|>assistant<|channel|>final<|message|>25.<|return|>"


def encoder_of(template: str, **options: Any) -> ChatEncoder:
    tokenizer = chats.make_tokenizer(template)
    names = ["<|channel|>", "<|message|>", "<|call|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return ChatEncoder(tokenizer, tokenizer.convert_tokens_to_ids(["<|end|>", "<|return|>", "<eos>"]), **options)


def hold(encoder: ChatEncoder, answers: list[str], greeting: bool = False) -> tuple[Dialogue, dict[str, Any]]:
    """A dialogue with these answers (the last one is truncated if it has no end token), and its line."""
    rounds = QUESTIONS[: len(answers)]
    if greeting:
        rounds = (({"role": "assistant", "content": "Welcome."}, *rounds[0]), *rounds[1:])
    dialogue = Dialogue(Prompt("p", "none", rounds))
    for answer in answers:
        assert dialogue.ask(encoder, 10**6) is not None
        stopped = answer.endswith(("<eos>", "<|end|>", "<|return|>"))
        ids = encoder.tokenizer(answer, add_special_tokens=False)["input_ids"]
        dialogue.take(ids, stopped, encoder.tokenizer, range(len(dialogue.answers), len(ids), 2))
    return dialogue, json.loads(json.dumps(_records([dialogue], encoder, save_rejections=True)[0]))


CASES = {
    "as it is": (chats.CHATML, ["25.<|end|>", "36, né?<|end|>"], False),
    "with marks": (chats.CHATML_MARKED, ["25.<|end|>", "36.<|end|>"], False),
    "trimmed": (chats.BRACKETS, [" 25.<eos>", "  36.\n<eos>"], True),
    "another end": (chats.CHATML, ["25.<eos>"], True),
    "cut": (chats.CHATML, ["25.<|end|>", "36 is"], True),
    "cut in the middle of a character": (chats.CHATML, ["é"], True),
    "channels": (OSS, [ANALYSIS], False),
    "channels, the earlier analysis is left out later": (OSS, [ANALYSIS, ANALYSIS], True),
    "reasoning of earlier turns is cut": (chats.FORGETS_THINKING, ["<think>x</think>25.<eos>", "36.<eos>"], True),
    "reasoning that the prompt opens": (OPENS_THINKING, ["x</think>25.<eos>", "y</think>36.<eos>"], True),
    "special tokens in the text": (chats.CHATML, ["it is <|start|> 25.<|end|>"], True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("greeting", [False, True])
def test_training_tokens_equal_the_dialogue(case: str, greeting: bool) -> None:
    template, answers, keeps_ids = CASES[case]
    if template == chats.BRACKETS and greeting:
        return  # roles must alternate
    encoder = encoder_of(template)
    if case.startswith("cut in"):
        real = encoder.tokenizer
        dialogue = Dialogue(Prompt("p", "none", QUESTIONS[:1]))
        dialogue.ask(encoder, 10**6)
        dialogue.take(real("aé", add_special_tokens=False)["input_ids"][:-1], False, real)
        line = json.loads(json.dumps(_records([dialogue], encoder, save_rejections=True)[0]))
    else:
        dialogue, line = hold(encoder, answers, greeting)
    if not greeting:
        assert ("answer_ids" in line) == keeps_ids
    [samples] = encoder.encode_all([parse_conversation(line, "line 1")])
    wanted = list(zip(dialogue.asked, dialogue.answers, strict=True))
    found, rejected = [], []
    for sample in samples:
        tokens, turns = sample.tokens.tolist(), sample.turns.tolist()
        for turn in sorted(set(turns) - {0}):
            where = [i for i, n in enumerate(turns) if n == turn]
            found.append((tokens[: where[0]], [tokens[i] for i in where]))
            rejected.append([i - where[0] for i in sample.rejected.tolist() if turns[i] == turn])
        assert all(turns[i] for i in sample.rejected.tolist())
    welcome = encoder.tokenizer("Welcome.", add_special_tokens=False)["input_ids"]
    own = [i for i, (_, answer) in enumerate(found) if answer[: len(welcome)] != welcome]
    assert [found[i] for i in own] == wanted
    assert [rejected[i] for i in own] == dialogue.rejected and sum(map(len, rejected)) == sum(
        map(len, dialogue.rejected)
    )


def test_line_with_consistent_history_is_one_sample() -> None:
    encoder = encoder_of(chats.BRACKETS)
    _, line = hold(encoder, [" 25.<eos>", " 36.<eos>"])
    assert "answer_ids" not in line
    _, line = hold(encoder, ["25.<eos>", " 36.<eos>"])  # the space that the template writes was not said
    assert len(encoder.encode_all([parse_conversation(line, "here")])[0]) == 2
    _, line = hold(encoder_of(chats.CHATML), ["25.<|end|>", "cut"])
    [sample] = encoder_of(chats.CHATML).encode_all([parse_conversation(line, "here")])[0]
    assert int(sample.turns.max()) == 2 and sample.tokens[-3:].tolist() == line["answer_ids"]["turns"][1]


def test_channels_become_reasoning_and_content() -> None:
    encoder = encoder_of(OSS)
    dialogue, line = hold(encoder, [ANALYSIS, "<|channel|>analysis<|message|>Cut thou"])
    assert [m for m in line["conversations"] if m["role"] == "assistant"] == [
        {"role": "assistant", "content": "25.", "reasoning_content": "Five fives."},
        {"role": "assistant", "content": "", "reasoning_content": "Cut thou"},
    ]
    asked = encoder.tokenizer.decode(dialogue.asked[1], skip_special_tokens=False)
    assert "final<|message|>25.<|end|>" in asked and "analysisFive" not in asked
    silent = encoder.tokenizer("<|channel|>final<|message|> ", add_special_tokens=False)["input_ids"]
    assert answer_message(silent, encoder.tokenizer) is None


def test_ids_of_another_tokenizer_are_refused() -> None:
    _, line = hold(encoder_of(chats.CHATML), ["cut"])
    other = chats.make_tokenizer(chats.CHATML)
    other.add_tokens(["cut"])
    with pytest.raises(UserError, match=r"line 7: answer_ids belong to another tokenizer .* remove the key"):
        ChatEncoder(other).encode_all([parse_conversation(line, "line 7")])
    del line["answer_ids"]
    with pytest.raises(UserError, match=r"line 7: rejected belong to another tokenizer .* remove the key"):
        ChatEncoder(other).encode_all([parse_conversation(line, "line 7")])
    del line["rejected"]
    assert ChatEncoder(other).encode_all([parse_conversation(line, "line 7")])


@pytest.mark.parametrize(
    "value",
    [[], {}, {"tokenizer": "a", "turns": []}, {"tokenizer": "a", "turns": [None]}, {"tokenizer": "a", "turns": [["1"]]},
     {"tokenizer": "a", "turns": [[-1]]}, {"turns": [[1]]}, {"tokenizer": "a", "turns": [[1], [2]]}],
)  # fmt: skip
def test_damaged_ids_are_refused_with_the_line(value: Any) -> None:
    _, line = hold(encoder_of(chats.CHATML), ["cut"])
    with pytest.raises(UserError, match=r"line 7: found answer_ids that do not fit .* remove the key"):
        parse_conversation({**line, "answer_ids": value}, "line 7")


@pytest.mark.parametrize("value", [[[0]], [[0], [1]], [[-1]], [["1"]], [0], [[True]], None])
def test_damaged_rejections_are_refused_with_the_line(value: Any) -> None:
    _, line = hold(encoder_of(chats.CHATML), ["25.<|end|>"])
    if value != [[0]]:
        value = {"tokenizer": line["rejected"]["tokenizer"], "turns": value}
    with pytest.raises(UserError, match=r"line 7: found rejected that does not fit the messages"):
        parse_conversation({**line, "rejected": value}, "line 7")


def test_rejections_of_other_tokens_are_refused() -> None:
    encoder = encoder_of(chats.CHATML)
    for answer in ("25.<|end|>", "cut"):  # by their text, by their ids
        dialogue, line = hold(encoder, [answer])
        line["rejected"]["turns"] = [[len(dialogue.answers[0])]]
        with pytest.raises(UserError, match=r"line 7: rejected names token \d+ of an answer of \d"):
            encoder.encode_all([parse_conversation(line, "line 7")])


def test_template_prefix_is_in_prompt_and_training() -> None:
    template = chats.CHATML.replace("assistant\n{% endif %}", "assistant\n{% if quiet %}<quiet>{% endif %}{% endif %}")
    template = template.replace("}}\n{{ m", "}}\n{% if quiet and m['role'] == 'assistant' %}<quiet>{% endif %}{{ m")
    for options, more in (({"template_kwargs": {"quiet": True}}, {}), ({}, {"chat_template_kwargs": {"quiet": True}})):
        encoder = encoder_of(template, **options)
        record = {"messages": chats.talk(("user", "hi"), ("assistant", "yo")), **more}
        sample = encoder.encode(parse_conversation(record, "here"))
        where = (sample.turns > 0).nonzero().flatten().tolist()
        assert encoder.tokenizer.decode(sample.tokens[where]) == "yo<|end|>"
        assert encoder.tokenizer.decode(sample.tokens[: where[0]]).endswith("assistant\n<quiet>")
        plain = encoder_of(template).encode(parse_conversation({"messages": record["messages"]}, "here"))
        assert "<quiet>" not in encoder.tokenizer.decode(plain.tokens)
    _, line = hold(encoder_of(template, template_kwargs={"quiet": True}), ["25.<|end|>"])
    assert line["chat_template_kwargs"] == {"quiet": True} and "answer_ids" not in line
    off = encoder_of(template, template_kwargs={"quiet": True})
    [sample] = off.encode_all([parse_conversation({**record, "chat_template_kwargs": {"quiet": False}}, "here")])[0]
    assert "<quiet>" not in off.tokenizer.decode(sample.tokens)
