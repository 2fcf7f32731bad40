"""A file that a tool did not write is not replaced; its own result is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from megatron_spec.evaluation import html
from megatron_spec.evaluation.report import require_report
from tools import bench_server, compare_reports, convert_questions, make_serving_config, plot_run, prepare_conversations

ANSWERS = json.dumps({"conversation_id": "q0", "conversations": []})  # as in a file of generate.py


def convert(folder: Path, output: Path, *flags: str) -> None:
    data = folder / "q.jsonl"
    data.write_text('{"question_id": 1, "turns": ["p"]}\n')
    convert_questions.main(
        convert_questions.make_parser().parse_args([str(data), "--output", str(output), *flags])
    )  # fmt: skip


def convert_for_trtllm(folder: Path, output: Path) -> None:
    convert(folder, output, "--format", "trtllm-bench")


def prepare(folder: Path, output: Path) -> None:
    source = folder / "source.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    source.write_text(json.dumps({"messages": turns}) + "\n")
    prepare_conversations.prepare(
        prepare_conversations.make_parser().parse_args([str(source), "--output", str(output)])
    )  # fmt: skip


def serve(folder: Path, output: Path, engine: str = "vllm") -> None:
    flags = ["--method", "ngram", "--engine", engine, "--base", "b", "--output", str(output)]
    make_serving_config.main(make_serving_config.make_parser().parse_args(flags))


def serve_with_trtllm(folder: Path, output: Path) -> None:
    serve(folder, output, "trtllm")


def serve_with_sglang(folder: Path, output: Path) -> None:
    serve(folder, output, "sglang")


def plot(folder: Path, output: Path) -> None:
    row = {"iteration": 1, "loss_per_step": [1.0], "accuracy_per_step": [0.5], "predicted_acceptance_length": 1.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    plot_run.main(plot_run.make_parser().parse_args([str(folder), "--output", str(output)]))


@pytest.mark.parametrize(
    "write", [convert, convert_for_trtllm, prepare, serve, serve_with_trtllm, serve_with_sglang, plot]
)
def test_only_an_own_result_is_replaced(tmp_path: Path, write: Callable[..., None]) -> None:
    output, other = tmp_path / "out.png", tmp_path / "other.png"  # the name that `plot` demands
    output.touch()
    write(tmp_path, output)
    before = output.read_bytes()
    write(tmp_path, output)
    assert before and output.read_bytes() == before
    for text in (ANSWERS, "speculative decoding, a thesis\n", "{"):
        other.write_text(text)
        with pytest.raises(UserError, match=r"--output .*other.* exists and is not a .*: it would be overwritten"):
            write(tmp_path, other)
        assert other.read_text() == text
    with pytest.raises(UserError, match=r"is a folder|ending in .png"):
        write(tmp_path, tmp_path)


def test_answers_with_their_settings_are_not_prepared_conversations(tmp_path: Path) -> None:
    """generate.py keeps the ids of its prompts, which are those of this tool."""
    output = tmp_path / "train.jsonl"
    prepare(tmp_path, output)
    (tmp_path / "train.jsonl.meta.json").write_text("{}")
    with pytest.raises(UserError, match=r"--output .* is not a result of prepare_conversations.py"):
        prepare(tmp_path, output)


def test_held_out_parts_are_not_lost_either(tmp_path: Path) -> None:
    source, other = tmp_path / "source.jsonl", tmp_path / "other.txt"
    prepare(tmp_path, tmp_path / "out.jsonl")
    other.write_text("thesis")
    flags = [str(source), "--output", str(tmp_path / "out.jsonl"), "--held-out", str(other)]
    with pytest.raises(UserError, match=r"--held-out .*other.txt exists"):
        prepare_conversations.prepare(prepare_conversations.make_parser().parse_args(flags))
    assert other.read_text() == "thesis"


def test_results_of_servers(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    output.write_text('{"servers": [], "levels": []}')
    bench_server.check_output(str(output), "q.jsonl")
    output.write_text('{"about": {}, "sweep": []}')
    with pytest.raises(UserError, match=r"is not a result of bench_server.py"):
        bench_server.check_output(str(output), "q.jsonl")


def test_reports(tmp_path: Path) -> None:
    """A report, and a part that a killed run left of one; not the answers of a killed generate.py."""
    output = tmp_path / "r.json"
    output.write_text('{"about": {}, "sweep": []}')
    part = tmp_path / "r.json.part0"
    part.write_text('{"about": {}, "draft_lens": [3]}\n')
    require_report(output)
    part.write_text(ANSWERS + "\n")
    with pytest.raises(UserError, match=r"r.json.part0 exists and is not of validate.py"):
        require_report(output)
    part.unlink()
    for text in ("[]", "thesis", '{"servers": [], "levels": []}', ANSWERS):
        output.write_text(text)
        with pytest.raises(UserError, match=r"--output .*r.json exists and is not a report of validate.py"):
            require_report(output)


def test_pages_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "r.html"
    for name in ("_summary", "_details", "_figure"):
        monkeypatch.setattr(html, name, lambda *_: "")
    html.write_html(page, {"eagle3": {"sweep": []}})
    html.require_page(page)
    assert "<title>Acceptance of eagle3</title>" in page.read_text()
    page.write_text("<!doctype html>\n<html><title>My page</title></html>")
    report = tmp_path / "r.json"
    report.write_text(json.dumps({"about": {}, "sweep": [], "answers": 1, "decode": {}}))
    with pytest.raises(UserError, match=r"--html .* is not a page of reports: it would be overwritten"):
        compare_reports.main(compare_reports.make_parser().parse_args([str(report), "--html", str(page)]))
    assert "My page" in page.read_text()
