"""The data benchmarks: what they create, measure and start."""

import json
import runpy
from collections import Counter

import pytest

from benchmarks import data_scale, data_throughput
from megatron_spec.config import UserError
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer
from tools import calibrate_draft_vocab, prepare_conversations


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "raw.jsonl"
    data_throughput.make_conversations(path, 1, untidy=True)
    return path


def test_untidy_conversations_are_dropped_by_preparation(conversations, tmp_path, capsys):
    records = [json.loads(line) for line in conversations.read_text().splitlines()]
    count = int(records[-1]["id"]) + 1
    assert 1e6 <= conversations.stat().st_size < 1.02e6 and count > 200
    twice = Counter(record["id"] for record in records)
    assert {i for i, n in twice.items() if n == 2} == {str(i) for i in range(3, count, 50)}
    flags = [str(conversations), "--output", str(tmp_path / "out.jsonl")]
    prepare_conversations.prepare(prepare_conversations.make_parser().parse_args(flags))
    said = capsys.readouterr().out
    assert f"{len(range(8, count, 100))} x unknown role 'judge'" in said
    assert f"{len(range(3, count, 50))} x seen before" in said
    data_throughput.make_conversations(tmp_path / "again.jsonl", 1, untidy=True)
    assert (tmp_path / "again.jsonl").read_bytes() == conversations.read_bytes()


def test_throughput_is_measured_in_one_line(conversations, tmp_path, capsys):
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    small = tmp_path / "small.jsonl"
    small.write_text("".join(line for line in conversations.read_text().splitlines(True)[:6]))
    flags = ["--tokenizer", str(tmp_path / "tokenizer"), "--data", str(small), "--num-workers", "1"]
    data_throughput.measure(data_throughput.make_parser().parse_args(flags))
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] > 5000 and found["tokens_per_second"] > 0 and found["conversations"] == 6
    assert not small.with_name("small.jsonl.tokens").exists()


def test_steps_are_valid_commands(tmp_path):
    steps = data_scale.steps("BASE", tmp_path, 512)
    assert list(steps) == ["prepare", "calibrate", "convert", "finetune"]
    prepare_conversations.make_parser().parse_args(steps["prepare"][1:])
    calibrate_draft_vocab.make_parser().parse_args(steps["calibrate"][1:])
    for name in ("convert", "finetune"):
        script, *flags = steps[name]
        runpy.run_path(str(data_scale.ROOT / script))["parser"]().parse_args(flags)


def test_memory_of_the_process_and_failures_are_reported(tmp_path):
    script = "import time; held = b'x' * 2**27; time.monotonic()"
    used = data_scale.watch(["-c", script], tmp_path / "log")
    assert max(used.largest) < 2000 and used.row(5, "step").startswith("| 5 | step | ")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        data_scale.watch(["-c", "1 / 0"], tmp_path / "log")
