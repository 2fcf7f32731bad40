"""The validation report, with correct and with broken verification."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_spec.config import ENGINE, UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.decoding import step
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.evaluation.html import render, write_html
from megatron_spec.evaluation.validate import tie_tolerance, validate
from megatron_spec.generation.prompts import Dialogue, Prompt
from tests.unit_tests.decoding.cpu_recorder import CpuRecorder
from tests.unit_tests.decoding.tiny_models import CHAT_CONFIG

module = importlib.import_module("megatron_spec.evaluation.validate")


def test_report(chat: Any, tmp_path: Path) -> None:
    output = tmp_path / "validate.json"
    huge = Prompt("huge", "none", (({"role": "user", "content": "x" * 300},),))
    report = validate(
        chat.base, NGramDrafter(2), [*chat.prompts, huge], chat.tokenizer, CHAT_CONFIG, output=output,
        stop_ids=chat.stop_ids,
    )  # fmt: skip
    run = report.first
    assert run.text_identical and run.mismatches == ()
    assert report.answers in (6, 7) and 0 < report.truncated < report.answers
    huge, *early = sorted(report.skipped, key=lambda line: not line.startswith("huge"))
    assert huge.startswith("huge: round 0 has") and all("round 0 was cut at 12 tokens" in line for line in early)
    assert report.base.tokens == run.speculative.tokens > report.answers
    assert report.base.seconds > 0 and run.speedup == pytest.approx(report.base.seconds / run.speculative.seconds)
    by_category = run.acceptance_by_category
    assert set(by_category) == {"math", "none", "qa"}
    assert sum(s.steps for s in by_category.values()) == run.acceptance.steps > 0
    for groups in (run.acceptance_by_prompt_length, run.acceptance_by_context_length):
        assert sum(s.steps for s in groups.values()) == run.acceptance.steps
    assert sum(run.acceptance_distribution) == pytest.approx(1)
    assert run.acceptance.steps + run.acceptance.prompts <= report.base.tokens
    assert run.costs is not None and run.costs.draft > 0 and run.predicted_speedup == pytest.approx(
        (run.acceptance.acceptance_length or 0)
        * run.costs.base / (run.costs.draft + run.costs.verify + run.costs.observe)
    )  # fmt: skip
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(report.to_dict()))
    assert written["decode"]["max_draft_len"] == 3


def test_recording_graphs_is_not_counted(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only advances while recording, answers take no time."""
    clock, recorder = [0.0], CpuRecorder()

    def record(function: Any) -> Any:
        clock[0] += 100.0
        return recorder(function)

    for name in ("megatron_spec.evaluation.validate", "megatron_spec.decoding.replay"):
        monkeypatch.setattr(importlib.import_module(name), "now", lambda: clock[0])
    monkeypatch.setattr("megatron_spec.decoding.replay.recorder_for", lambda base: record)
    measured = _seconds_of(chat)
    assert clock[0] == 100.0 * recorder.recorded > 0 and measured == [0.0, 0.0]


def _seconds_of(chat: Any) -> list[float]:
    config = CHAT_CONFIG.replace(max_new_tokens=24)
    run = module._Validation(
        chat.base, NGramDrafter(2), chat.prompts, ChatEncoder(chat.tokenizer), config, chat.stop_ids, None, None, {}
    )
    return run._measure([Dialogue(p) for p in chat.prompts[:2]], SimpleNamespace(update=lambda: None)).seconds


@pytest.fixture
def wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that emits other tokens than it should wherever something was drafted."""
    real = step.verify

    def verify(*args: Any) -> Any:
        verdict = real(*args)
        if args[1].depth:
            verdict.emitted_BP = (verdict.emitted_BP + 1) % 200 + 30
        return verdict

    monkeypatch.setattr(step, "verify", verify)


@pytest.mark.usefixtures("wrong_text")
def test_wrong_text_is_detected(chat: Any) -> None:
    report = validate(chat.base, NGramDrafter(2), chat.prompts[:1], chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids)
    assert report.first.text_identical is False
    [mismatch] = report.first.mismatches
    assert (mismatch.identifier, mismatch.round, mismatch.position) == (chat.prompts[0].identifier, 0, 1)
    assert mismatch.speculative_token == ((mismatch.base_token or 0) + 1) % 200 + 30
    assert mismatch.top_gap > 1e-3 and not mismatch.near_tie and report.first.near_ties == 0


@pytest.mark.usefixtures("wrong_text")
def test_exact_ties_are_not_differences(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wrong text, with two tokens patched to share the largest logit: both counts are reported."""
    prompts = chat.prompts[:1]
    wrong = validate(chat.base, NGramDrafter(2), prompts, chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids).first
    [mismatch] = wrong.mismatches
    assert (wrong.differences, wrong.exact_ties, wrong.unexplained) == (1, 0, 1) and not mismatch.exact_tie
    pair = [mismatch.base_token, mismatch.speculative_token]
    for best, values, tie in ((pair, [4.0, 4.0], True), (pair, [4.0, 3.9], False), ([1, 2], [4.0, 4.0], False)):
        monkeypatch.setattr(module, "two_best", lambda *args, best=best, values=values: (values, best))
        report = validate(chat.base, NGramDrafter(2), prompts, chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids)
        run = report.first
        assert (run.exact_ties, run.differences, run.text_identical) == (int(tie), int(not tie), tie)
        written = report.to_dict()
        assert (written["exact_ties"], written["differences"]) == (run.exact_ties, run.differences)
        assert ("1 exact ties" in render({"d": written})) is tie


def test_memory_is_reported(chat: Any) -> None:
    report = run_of(chat)
    memory = report.memory
    config = chat.base.config
    assert memory.base == sum(t.numel() * t.element_size() for t in (*chat.base.parameters(), *chat.base.buffers()))
    assert memory.draft == memory.draft_cache == 0 and memory.sequences == CHAT_CONFIG.batch_size
    kv = 2 * config.num_layers * config.num_key_value_heads * config.head_dim * 4
    assert memory.base_cache == memory.sequences * memory.tokens * kv > 0
    page = render({"d": report.to_dict()})
    assert f"{memory.base / 2**20:,.1f}" in page and f"KV cache of {memory.sequences} texts" in page
    assert "memory of" not in render({"d": {k: v for k, v in report.to_dict().items() if k != "memory"}})


def test_empty_validation_is_refused(chat: Any) -> None:
    for draft, prompts, config in (
        (None, chat.prompts, CHAT_CONFIG),
        (NGramDrafter(), [], CHAT_CONFIG),
        (NGramDrafter(), chat.prompts, CHAT_CONFIG.replace(max_draft_len=0)),
    ):
        with pytest.raises(UserError, match=r"expected prompts and a draft|--max-draft-len: found \[0\]"):
            validate(chat.base, draft, prompts, chat.tokenizer, config, stop_ids={1})
    huge = [Prompt("huge", "none", (({"role": "user", "content": "x" * 300},),))]
    with pytest.raises(UserError, match=r"none of 1 prompts could be answered, the first: huge: round 0 has"):
        validate(chat.base, NGramDrafter(), huge, chat.tokenizer, CHAT_CONFIG, stop_ids={1})


def test_tie_tolerance_grows_with_coarser_dtypes() -> None:
    assert tie_tolerance(torch.float32, 30.0) == 1e-3
    assert tie_tolerance(torch.bfloat16, 16.0) == pytest.approx(0.5)


def run_of(chat: Any, output: Path | None = None, draft: Any = None, **changes: Any) -> Any:
    lens = changes.pop("draft_lens", None)
    config = CHAT_CONFIG.replace(**{"decoding_type": "NGram", **changes})
    return validate(
        chat.base, draft, chat.prompts, chat.tokenizer, config, stop_ids=chat.stop_ids, output=output, draft_lens=lens
    )


def test_sweep_equals_individual_runs(chat: Any, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    report = run_of(chat, output, draft_lens=(1, 2, 4))
    assert [run.max_draft_len for run in report.runs] == [1, 2, 4]
    for run in report.runs:
        alone = run_of(chat, max_draft_len=run.max_draft_len).first
        assert run.text_identical and run.acceptance == alone.acceptance
        assert run.acceptance_by_prompt_length == alone.acceptance_by_prompt_length
    written = json.loads(output.read_text())
    assert written["acceptance_length"] == written["sweep"][0]["acceptance_length"] and len(written["sweep"]) == 3
    with pytest.raises(UserError, match=r"--max-draft-len: found \[2, 2\], expected distinct"):
        run_of(chat, draft_lens=(2, 2))


def test_the_base_alone_is_timed_once(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[str | None, int, int]] = []
    inner = module.decode

    def decode(base: Any, ids: Any, config: Any, *rest: Any, **more: Any) -> Any:
        found = inner(base, ids, config, *rest, **more)
        if "costs" in more:
            timed.append((config.decoding_type, config.max_new_tokens, len(more["costs"].seconds["base"])))
        return found

    monkeypatch.setattr(module, "decode", decode)
    report = run_of(chat, draft_lens=(1, 2))
    assert [name for name, _, _ in timed] == [None, "NGram", "NGram"] and timed[0][1:] == (5, 4)
    assert timed[1:] == [("NGram", 9, 4), ("NGram", 13, 4)]  # no sequence may have ended
    first, second = (run.costs for run in report.runs)
    assert first is not None and second is not None and first.base == second.base > 0


def test_killed_validation_resumes(chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.json"
    monkeypatch.setattr(module, "WINDOW", 1)  # two dialogues at a time
    expected = run_of(chat, draft_lens=(2, 3))
    real, asked = module.decode, []

    def dies(base: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        if len(asked) == 7:  # three ways to warm up, three ways for the first window
            raise KeyboardInterrupt
        return real(base, prompts, *args, **options)

    monkeypatch.setattr(module, "decode", dies)
    with pytest.raises(KeyboardInterrupt):
        run_of(chat, output, draft_lens=(2, 3))
    part = tmp_path / "report.json.part0"
    assert len(part.read_text().splitlines()) == 2 and not output.exists()
    part.write_text(part.read_text() + '{"half')
    again: list[int] = []
    monkeypatch.setattr(module, "decode", lambda b, p, *a, **o: (again.append(len(p)), real(b, p, *a, **o))[1])
    report = run_of(chat, output, draft_lens=(2, 3))
    assert [run.acceptance for run in report.runs] == [run.acceptance for run in expected.runs]
    assert (report.answers, report.skipped) == (expected.answers, expected.skipped)
    assert not part.exists() and output.is_file() and sum(again[3:-3]) < 3 * report.answers
    # What another run left is not taken for this one.
    part.write_text('{"decode": "another"}\n{"answers": []}\n')
    assert run_of(chat, output, draft_lens=(2, 3)).answers == expected.answers


def test_a_journal_of_other_modules_or_templates_is_not_continued(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed run measured is kept only for the same implementation, which decides speed and rounding, and for
    the same tokenizer and template."""
    from megatron_spec.commands import decode

    others = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    words = shutil.copytree(chat.folder, tmp_path / "words", ignore=others)
    template = words / "chat_template.jinja"
    template.write_text(template.read_text() + " ")

    models = decode.Models(chat.base, None, "fingerprint", False)
    for name in ("load_models", "check_draft_modules_of"):
        monkeypatch.setattr(decode, name, lambda *_: models)
    monkeypatch.setattr(decode.te, "check", lambda *_: None)
    seen: list[str] = []

    def killed(*args: Any, about: dict[str, Any], **options: Any) -> Any:
        seen.append(json.dumps(about))
        assert options["stop_ids"] == {1, 2}, "those of the base count beside a tokenizer of another folder, too"
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "run_validation", killed)
    for changes in (
        {}, {"layers": ENGINE}, {"draft_transformer_impl": "transformer_engine"}, {"plain": True},
        {"tokenizer": str(words)}, {},
    ):  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            decode.validate(
                str(chat.questions), base=str(chat.folder), output=str(tmp_path / "report.json"),
                decode=CHAT_CONFIG.replace(decoding_type="NGram"), **changes,
            )  # fmt: skip
    assert len(set(seen)) == 5 and seen[0] == seen[-1]


def test_text_is_not_compared_where_it_may_differ(chat: Any) -> None:
    for options in (dict(typical_acceptance=True), dict(use_rejection_sampling=True)):
        draft = NGramDrafter() if "use_rejection_sampling" in options else None
        kind = {"decoding_type": None} if draft else {}
        report = run_of(chat, draft=draft, temperature=1.0, **options, **kind)
        assert report.first.text_identical is None and report.first.mismatches == ()


def test_html_page_is_self_contained(chat: Any, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    report = run_of(chat, draft_lens=(1, 3)).to_dict()
    write_html(tmp_path / "one.html", {"n-grams <2>": report})
    write_html(tmp_path / "two.html", {"a": report, "b": report})
    page = (tmp_path / "one.html").read_text()
    assert "n-grams &lt;2&gt;" in page and page.count("<svg") == 7 and f"{report['acceptance_length']:.3f}" in page
    links = re.findall(r"""(?:src|href)=["'](?!#)|https?://(?!www\.w3\.org)""", page)
    assert links == []  # nothing is fetched
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    assert page == render({"n-grams <2>": report})
    odd = (tmp_path / "odd.html", {"_a": report, "cost $x_ and $\\frac": report})
    write_html(*odd)
    for svg in re.findall(r"<svg.*?</svg>", odd[0].read_text(), flags=re.DOTALL):
        assert "> _a</text>" in svg and r"cost $x_ and $\frac</text>" in svg  # both are in the legend
    assert "With draft length 1, the first:" in page and "category (first draft length)</text>" in page
    with pytest.raises(UserError, match="at least one report"):
        write_html(tmp_path / "none.html", {})


def test_the_report_names_its_prompts_by_content(chat: Any) -> None:
    """The same questions have one digest with any draft, others another."""
    found = [
        validate(
            chat.base, NGramDrafter(n), chat.prompts[:count], chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids
        ).about["prompts_digest"]
        for n, count in ((1, 2), (2, 2), (2, 1))
    ]
    assert found[0] == found[1] != found[2]
