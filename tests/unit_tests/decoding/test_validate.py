"""The validation report, with drafts that are honest and a base that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.decoding import engine
from megatron_spec.decoding.drafters.ngram import NGramDrafter
from megatron_spec.decoding.prompts import Prompt
from megatron_spec.decoding.validate import tie_tolerance, validate
from tests.unit_tests.decoding.setting import CHAT_CONFIG


def test_report_of_an_honest_draft(chat: Any, tmp_path: Path) -> None:
    output = tmp_path / "validate.json"
    huge = Prompt("huge", "none", (({"role": "user", "content": "x" * 300},),))
    report = validate(
        chat.base, NGramDrafter(2), [*chat.prompts, huge], chat.tokenizer, CHAT_CONFIG, output=output,
        stop_ids=chat.stop_ids,
    )  # fmt: skip
    assert report.text_identical and report.mismatches == ()
    assert report.answers in (6, 7) and 0 < report.truncated < report.answers
    assert len(report.skipped) == 1 and report.skipped[0].startswith("huge: round 0")
    assert report.base.tokens == report.speculative.tokens > report.answers
    assert report.base.seconds > 0 and report.speedup == pytest.approx(report.base.seconds / report.speculative.seconds)
    by_category = report.acceptance_by_category
    assert set(by_category) == {"math", "none", "qa"}
    assert sum(s.steps for s in by_category.values()) == report.acceptance.steps > 0
    assert report.acceptance.steps + report.acceptance.prompts <= report.base.tokens
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(report.to_dict()))
    assert written["decode"]["max_draft_len"] == 3


def test_a_wrong_text_is_found(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that accepts whatever is drafted must not pass."""
    real = engine.verify

    def credulous(*args: Any) -> Any:
        verdict = real(*args)
        if args[1].depth:
            verdict.emitted_BP = (verdict.emitted_BP + 1) % 200 + 30
        return verdict

    monkeypatch.setattr(engine, "verify", credulous)
    report = validate(chat.base, NGramDrafter(2), chat.prompts[:1], chat.tokenizer, CHAT_CONFIG, stop_ids=chat.stop_ids)
    assert not report.text_identical
    [mismatch] = report.mismatches
    assert (mismatch.identifier, mismatch.round, mismatch.position) == (chat.prompts[0].identifier, 0, 1)
    assert mismatch.speculative_token == ((mismatch.base_token or 0) + 1) % 200 + 30
    assert mismatch.top_gap > 1e-3 and not mismatch.near_tie and report.near_ties == 0


def test_nothing_to_validate_is_refused(chat: Any) -> None:
    for draft, prompts, config in (
        (None, chat.prompts, CHAT_CONFIG),
        (NGramDrafter(), [], CHAT_CONFIG),
        (NGramDrafter(), chat.prompts, CHAT_CONFIG.replace(max_draft_len=0)),
    ):
        with pytest.raises(UserError, match="max-draft-len"):
            validate(chat.base, draft, prompts, chat.tokenizer, config, stop_ids={1})


def test_tie_tolerance_grows_with_coarser_numbers() -> None:
    assert tie_tolerance(torch.float32, 30.0) == 1e-3
    assert tie_tolerance(torch.bfloat16, 16.0) == pytest.approx(0.5)
