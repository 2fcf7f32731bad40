"""benchmarks/vllm_speed.py over a stand-in of vLLM: what it asks, what it counts, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_speed


class Params:
    """vLLM's SamplingParams, as far as they are read here."""

    def __init__(self, **given: Any) -> None:
        self.given = given


class Tokenizer:
    """A token for each character; the template marks the question and the answer."""

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['content']}>" for m in messages)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


class Engine:
    """vLLM's LLM: every call of `generate` drafts 10 times and has 15 tokens accepted when it has a draft."""

    made: list[Engine] = []
    short = 0

    def __init__(self, base: str, **given: Any) -> None:
        self.base, self.given, self.asked, self.calls = base, given, [], 0
        Engine.made.append(self)

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def generate(self, prompts: list[dict[str, list[int]]], params: Params, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params.given))
        self.calls += 1
        length = params.given["max_tokens"] - Engine.short
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * length)]) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        if self.given["speculative_config"] is None:
            return []
        names = {"vllm:spec_decode_num_drafts": 10.0, "vllm:spec_decode_num_accepted_tokens": 15.0}
        return [SimpleNamespace(name=n, value=v * self.calls) for n, v in names.items()]


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two files of three questions; vLLM and its processes are stand-ins."""
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = Engine, Params, "0.25.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_speed, "in_a_process", lambda function, *args: function(*args))
    monkeypatch.setattr(Engine, "made", [])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        lines = [{"turns": [f"{path.stem}{i}", "more"]} for i in range(3)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(path) for path in paths]


def start(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_speed.py", "--base", "BASE", *flags])
    vllm_speed.main()


def test_many_requests_at_once(
    sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    start(monkeypatch, "--prompts", *sets, "--together", "12", "4", "--draft", "DRAFT", "--output", str(out))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(out.read_text()) == lines
    kinds = [(x["requests"], x["draft"], x["temperature"]) for x in lines]
    assert kinds == [(n, d, t) for n in (12, 4) for d in (False, True) for t in (0.0, 1.0)]
    assert all(x["tokens"] == 192 * x["requests"] and x["seconds"] >= 0 for x in lines)
    assert [x["prompt_tokens"] for x in lines] == [48] * 4 + [16] * 4
    assert {x["acceptance_length"] for x in lines if x["draft"]} == {2.5}
    assert [e.given["max_num_seqs"] for e in Engine.made] == [12, 12, 4, 4]
    for made in Engine.made:
        assert made.given["enable_prefix_caching"] is False and "compilation_config" not in made.given
        temperatures = [given["temperature"] for _, given in made.asked]
        assert temperatures == [0.0, 0.0, 1.0, 1.0]  # each warmed up by a run of its own
        assert all(given["ignore_eos"] and not given["detokenize"] for _, given in made.asked)
    asked = ["".join(map(chr, p["prompt_token_ids"])) for p in Engine.made[0].asked[0][0]]
    assert asked == [f"<{name}{i}>" for name in "ab" for i in range(3) for _ in range(2)]
    thinned = ["".join(map(chr, p["prompt_token_ids"])) for p in Engine.made[2].asked[0][0]]
    assert thinned == ["<a0>", "<a1>", "<b0>", "<b1>"]


def test_limits_of_the_engine(sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--together", "6", "--max-cudagraph", "1024", "--temperatures", "0.5", "--questions", "1"]
    start(monkeypatch, "--prompts", *sets, *flags)
    [made] = Engine.made
    assert made.given["compilation_config"] == {"max_cudagraph_capture_size": 1024}
    assert [given["temperature"] for _, given in made.asked] == [0.5, 0.5]
    assert {"".join(map(chr, p["prompt_token_ids"])) for p in made.asked[0][0]} == {"<a0>", "<b0>"}


def test_answers_of_another_length_are_no_measurement(sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "short", 3)
    with pytest.raises(SystemExit, match=r"answers of \[189\] tokens, expected 192"):
        start(monkeypatch, "--prompts", *sets, "--together", "2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperatures", "0.7"], "--temperatures: only with --together"),
        (["--max-cudagraph", "8"], "--max-cudagraph: only with --together"),
        (["--together", "0"], "--together 0: expected 1 or more"),
    ],
)
def test_flags_without_effect_are_refused(
    sets: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        start(monkeypatch, "--prompts", *sets, *flags)
    assert left.value.code == 2 and message in capsys.readouterr().err and Engine.made == []
