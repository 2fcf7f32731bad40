import json

import pytest

from megatron_spec.config import UserError
from tests.unit_tests.data.chat_fixtures import CHATML, make_tokenizer, talk, write_lines
from tools import inspect_data

pytest.importorskip("rich")
TALKS = [
    talk(("user", "hi"), ("assistant", "yo")),
    talk(("user", "hi"), ("assistant", "a" * 90), ("user", "q"), ("assistant", "b")),
    talk(("user", "q" * 200), ("assistant", "lost")),
]


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def run(folder, data, *more):
    flags = ["--data", str(data), "--tokenizer", str(folder / "tokenizer"), "--seq-length", "100", *more]
    inspect_data.inspect_data(inspect_data.make_parser().parse_args(flags))


def test_figures_match_the_data(folder, capsys):
    data = write_lines(folder / "d.jsonl", TALKS)
    run(folder, data, "--json")
    found = json.loads(capsys.readouterr().out)
    before = 18 + 10 + 11  # bytes of the system turn, of a user turn of two letters, of the header
    assert found["lengths"][0] == before + 4 and found["answer_lengths"] == [2, 3, 5, 5, 91, 91, 91]
    assert found["turns"] == {"1": 2, "2": 1}
    assert found["dropped"] == {"nothing supervised within seq_length": 1}
    first, second, third = before + 4, before + 92 + 9 + 11 + 3, 18 + 208 + 11 + 6
    assert found["lost_tokens"] == second + third - 200 and found["lengths"][-1] == third
    assert (found["packed_rows"], found["packed_fill"]) == (2, pytest.approx((first + 100) / 200))


def test_assistant_text_is_coloured(folder, capsys, monkeypatch):
    data = write_lines(folder / "d.jsonl", TALKS)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    run(folder, data, "--samples", "1")
    said = capsys.readouterr().out
    assert "line 1" in said and "line 2" not in said
    green = [part.split("\x1b[")[0] for part in said.split("\x1b[4;32m")[1:]]
    assert green == ["yo<|end|>"]
    assert "supervised share" in said and "rows with --packing" in said


def test_supervised_text_is_bracketed_in_files(folder, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    run(folder, write_lines(folder / "d.jsonl", TALKS), "--samples", "1")
    assert "\u27e6yo<|end|>\u27e7" in capsys.readouterr().out


def test_useless_mask_is_refused_with_its_line(folder):
    everything = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    make_tokenizer(everything).save_pretrained(folder / "tokenizer")
    data = write_lines(folder / "d.jsonl", TALKS)
    with pytest.raises(UserError, match=r"d.jsonl line 1: every token counts as the assistant's"):
        run(folder, data)
