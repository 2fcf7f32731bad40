"""The benchmarks of decoding: what generate.py writes, answers one by one, where the time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_speed, device_time, generation_throughput
from megatron_spec import api
from megatron_spec.config import UserError
from tests.unit_tests.decoding import tiny_models


def test_one_line_per_setting(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base", str(chat.folder), "--prompts", str(chat.questions), "--dtype", "float32", "--batch-sizes", "2"]
    flags += ["--max-new-tokens", "5", "--temperatures", "0", "0.7"]
    generation_throughput.measure(generation_throughput.make_parser().parse_args(flags))
    greedy, sampled = map(json.loads, capsys.readouterr().out.splitlines())
    assert greedy["answers"] == sampled["answers"] == 5 and sampled["temperature"] == 0.7  # two have a second round
    for line in (greedy, sampled):
        assert 5 <= line["tokens"] <= 25 and line["steps"] and line["file_tokens_per_second"] > 0
        assert 0 < line["host_ms_per_step"] <= line["ms_per_step"]
    with pytest.raises(UserError, match="no step to time"):
        generation_throughput.measure(generation_throughput.make_parser().parse_args([*flags, "--max-new-tokens", "1"]))


def test_as_many_requests_as_asked_for(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer has all its tokens, whatever ends one."""
    flags = ["--base", str(chat.folder), "--prompts", str(chat.questions), "--dtype", "float32"]
    flags += ["--together", "7", "2", "--max-new-tokens", "9"]
    generation_throughput.measure(generation_throughput.make_parser().parse_args(flags))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["requests"], x["temperature"]) for x in lines] == [(7, 0.0), (7, 1.0), (2, 0.0), (2, 1.0)]
    assert [x["tokens"] for x in lines] == [63, 63, 18, 18]
    assert lines[0]["prompt_tokens"] == lines[1]["prompt_tokens"] > lines[2]["prompt_tokens"] > 0
    with pytest.raises(UserError, match="leave --batch-sizes and --profile out"):
        generation_throughput.measure(generation_throughput.make_parser().parse_args([*flags, "--batch-sizes", "2"]))


def test_questions(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base", str(chat.folder), "--dtype", "float32", "--max-new-tokens", "12", "--batch-sizes", "2", "16"]
    flags += ["--questions", "9"]
    generation_throughput.measure(generation_throughput.make_parser().parse_args(flags))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["batch_size"], x["temperature"], x["questions"]) for x in lines] == [(2, 1.0, 9), (16, 1.0, 9)]
    assert lines[0]["draws"] == lines[1]["draws"] >= 9 and lines[0]["shares"] == lines[1]["shares"]
    assert sum(lines[0]["shares"].values()) == pytest.approx(1, abs=0.01)
    assert lines[0]["steps"] > lines[1]["steps"] > 0 and lines[0]["refills"] > lines[1]["refills"] > 0
    for more, message in (
        (["--prompts", str(chat.questions)], "or --questions N"),
        (["--profile"], "leave --together and --profile out"),
        (["--temperatures", "0"], "greater than 0"),
    ):
        with pytest.raises(UserError, match=message):
            generation_throughput.measure(generation_throughput.make_parser().parse_args([*flags, *more]))


def test_profile(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--base",
        str(chat.folder),
        "--prompts",
        str(chat.questions),
        "--dtype",
        "float32",
        "--batch-sizes",
        "1",
        "3",
    ]
    flags += ["--profile", "--profile-tokens", "6", "--temperatures", "0"]
    generation_throughput.measure(generation_throughput.make_parser().parse_args(flags))
    one, three = map(json.loads, capsys.readouterr().out.splitlines())
    for line in (one, three):
        assert line["steps"] == 5 and line["kernels_per_step"] > 10 and line["device_ms_per_step"] > 0
        assert sum(line["shares"].values()) == pytest.approx(1, abs=0.01) and line["shares"]["products"] > 0
    assert (one["batch_size"], three["batch_size"]) == (1, 3)


def test_kinds_of_kernels() -> None:
    kinds = {
        "_attention_kernel": "attention", "flash_fwd_splitkv_kernel": "attention", "_product_kernel": "products",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "products", "_norm_kernel": "norms, rotation, gate",
        "void at::native::reduce_kernel<512>": "choice of tokens", "Memcpy DtoD": "copies",
        "vectorized_elementwise_kernel": "other element-wise",
    }  # fmt: skip
    assert {name: device_time.kind_of(name) for name in kinds} == kinds


@pytest.mark.parametrize("exported", [True, False])
def test_speed_one_by_one(chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], exported: bool) -> None:
    base = tiny_models.load(chat.folder, chat.base.world)
    model = api.convert(base, [("eagle", {"capture_layer_ids": list(tiny_models.CAPTURES)})], base_path=chat.folder)
    if exported:
        api.export_draft(model, tmp_path / "draft", dtype="float32")
    else:
        api.save(model, tmp_path / "draft")
    flags = ["--base", str(chat.folder), "--draft", str(tmp_path / "draft"), "--prompts", str(chat.questions)]
    flags += ["--questions", "2", "--dtype", "float32", "--max-new-tokens", "6", "--phase-tokens", "8"]
    decode_speed.measure(decode_speed.make_parser().parse_args(flags + ["--sa-threshold", "3"] * (not exported)))
    line, alone, drafted = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["set"], line["questions"], line["same_texts"]) == ("questions", 2, 1.0)
    for side in ("base", "draft"):
        assert line[side]["without_prefill"] > 0 and line[side]["tokens_per_second"] > 0
    assert line["base"]["tokens_per_step"] == 1.0 <= line["draft"]["tokens_per_step"]
    assert alone["draft"] >= 0 == alone["observe"] and alone["base"] > 0
    assert drafted["draft"] > 0 and drafted["observe"] > 0 and drafted["kernels"]["kernels_per_step"] > 10


def test_speed_of_the_base_alone(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base", str(chat.folder), "--prompts", str(chat.questions), "--questions", "1", "--dtype", "float32"]
    flags += ["--max-new-tokens", "4", "--phase-tokens", "6"]
    decode_speed.measure(decode_speed.make_parser().parse_args(flags))
    line, alone = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["base"]["tokens_per_second"] > 0 and "draft" not in line and alone["phases"] == "base"
    for more in (["--max-draft-len", "3"], ["--sa-threshold", "2"]):
        with pytest.raises(UserError, match=f"{more[0]} needs --draft"):
            decode_speed.measure(decode_speed.make_parser().parse_args([*flags, *more]))


def test_speed_of_answers_of_one_token(chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing comes after the prefill, so there is no ratio without it; only first questions are asked."""
    base = tiny_models.load(chat.folder, chat.base.world)
    model = api.convert(base, [("eagle", {"capture_layer_ids": list(tiny_models.CAPTURES)})], base_path=chat.folder)
    api.save(model, tmp_path / "draft")
    data = tmp_path / "two_rounds.jsonl"
    data.write_text("".join(json.dumps({"question_id": i, "turns": ["red sky", "and then?"]}) + "\n" for i in range(3)))
    flags = ["--base", str(chat.folder), "--draft", str(tmp_path / "draft"), "--dtype", "float32"]
    flags += ["--questions", "2", "--max-new-tokens", "1", "--phase-tokens", "8", "--prompts"]
    decode_speed.measure(decode_speed.make_parser().parse_args([*flags, str(data)]))
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (
        line["questions"] == 2 and line["ratio"]["without_prefill"] is None and line["ratio"]["tokens_per_second"] > 0
    )
    data.write_text(json.dumps({"question_id": 1, "turns": ["red sky " * 20_000]}))
    with pytest.raises(UserError, match="no question fits"):
        decode_speed.measure(decode_speed.make_parser().parse_args([*flags, str(data)]))
    with pytest.raises(UserError, match="2 files are called two_rounds"):
        decode_speed.measure(decode_speed.make_parser().parse_args([*flags, str(data), f"other/{data.name}"]))
