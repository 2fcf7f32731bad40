"""benchmarks/context_lengths.py on a tiny base: contexts of the right length, drafts trained alike, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import context_lengths
from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from tests.functional_tests.script_helpers import make_base, write_conversations
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    make_base(folder / "base", max_position_embeddings=512)
    write_conversations(folder / "data.jsonl", 24)
    lines = [{"question_id": i, "turns": [f"blue sea {i}", "why?"], "system": "Be brief."} for i in range(3)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def start(place: Path, *more: object) -> None:
    flags = [
        "--base", place / "base", "--prompts", place / "qa.jsonl", "--data", place / "data.jsonl", "--output",
        place / "out", "--train-lengths", 128, 384, "--lengths", 192, 448, "--window", 24, "--steps", 2,
        "--tokens-per-step", 384, "--ttt-steps", 2, "--draft-vocab-size", 64, "--questions", 3, "--max-new-tokens", 12,
        "--max-draft-len", 2, "--batch-size", 3, *more,
    ]  # fmt: skip
    context_lengths.main(context_lengths.make_parser().parse_args([str(x) for x in flags]))


def figures(place: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (place / "out" / "results.jsonl").read_text().splitlines()]
    found = {line["name"]: line for line in lines if line["kind"] == "context"}
    assert len(found) == sum(line["kind"] == "context" for line in lines), "a figure was measured twice"
    return found


def test_acceptance_by_context_length(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, tuple[Any, Any, int]] = {}
    inner = context_lengths.measure

    def noted(run: Any, draft: Any, *rest: Any) -> None:
        config = draft.config
        asked[draft.name] = config.sliding_window, config.rope.factor, config.rope.original_max_position_embeddings
        inner(run, draft, *rest)

    monkeypatch.setattr(context_lengths, "measure", noted)
    start(place)
    assert asked["128"][0] is None and asked["128, window"][0] == asked["128, window in decoding"][0] == 24
    assert asked["384, YaRN 1.16667"] == (None, pytest.approx(448 / 384), 384)
    found = figures(place)
    drafts = {
        *(f"{n}{way}" for n in (128, 384) for way in ("", ", window", ", window in decoding")),
        "128, YaRN 3.5", "384, YaRN 1.16667",
    }  # fmt: skip
    assert {line["draft"] for line in found.values()} == drafts and len(found) == 2 * len(drafts)
    for line in found.values():
        assert line["identical"] == 1.0 and line["few"]["steps"] > 0 and line["steps"] == 2
        assert line["length"] - 12 - 100 < line["tokens"] <= line["length"] - 12  # one more conversation did not fit
    text = (place / "out" / "context.md").read_text()
    assert "| 128, YaRN 3.5 |" in text and "192 tokens | 448 tokens" in text and "Change against full" in text
    written = [json.loads(line) for line in (place / "out" / "train-384.jsonl").read_text().splitlines()]
    assert len(written) < len((place / "out" / "train-128.jsonl").read_text().splitlines())
    start(place)
    assert figures(place) == found
    with pytest.raises(UserError, match=r"other settings \(window: found 24, now 32\)"):
        start(place, "--window", 32)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lengths", 600], "--lengths 600: the base's max_position_embeddings is 512"),
        (["--train-lengths", 64, 64], "--train-lengths 64 64: expected distinct lengths"),
        (["--tokens-per-step", 300], "--train-lengths 384 exceeds --tokens-per-step 300"),
        (["--lengths", 512, "--data", "few"], "--lengths 512: held-out conversations fill only"),
        (["--window", 1], "--ttt-steps 2: more than --window 1"),
    ],
)
def test_refusals(place: Path, flags: list[object], expected: str) -> None:
    few = write_conversations(place / "few.jsonl", 8)
    with pytest.raises(UserError, match=expected):
        start(place, "--output", place / "refused", *(few if x == "few" else x for x in flags))


def test_dialogues_share_no_conversation(place: Path) -> None:
    dialogues = context_lengths.Dialogues(place / "data.jsonl", ChatEncoder(make_tokenizer(CHATML_MARKED)))
    assert len(dialogues.held) == 3 and len(dialogues.trained) == 21
    joined = list(dialogues.joined(200))
    assert [m for messages in joined for m in messages] == [m for messages, _ in dialogues.trained for m in messages]
    sizes = [size for _, size in dialogues.held]
    assert dialogues.context(2, sizes[2] + sizes[0] + sizes[1] - 1) == dialogues.held[2][0] + dialogues.held[0][0]
    assert dialogues.context(1, 10**6) == [m for i in (1, 2, 0) for m in dialogues.held[i][0]]
    assert dialogues.context(1, min(sizes) - 1) == []
