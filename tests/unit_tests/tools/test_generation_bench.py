"""The benchmark of generation measures what generate.py writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import generation_throughput


def test_one_line_per_setting(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base", str(chat.folder), "--prompts", str(chat.questions), "--dtype", "float32", "--batch-sizes", "2"]
    flags += ["--max-new-tokens", "5", "--temperatures", "0", "0.7"]
    generation_throughput.measure(generation_throughput.make_parser().parse_args(flags))
    greedy, sampled = map(json.loads, capsys.readouterr().out.splitlines())
    assert greedy["answers"] == sampled["answers"] == 3 and sampled["temperature"] == 0.7
    for line in (greedy, sampled):
        assert 3 <= line["tokens"] <= 15 and line["steps"] and line["file_tokens_per_second"] > 0
        assert 0 < line["host_ms_per_step"] <= line["ms_per_step"]
