"""Comparison of reports: refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_spec.config import UserError
from tools.compare_reports import main, make_parser, read_reports


def write(path: Path, prompts: str = "a.jsonl", **about: str) -> str:
    told = {"prompts": prompts, "decoding_type": "NGram", "draft": "NGram", **about}
    decode = {"max_new_tokens": 9, "temperature": told.pop("temperature", "0")}
    path.write_text(json.dumps({"about": told, "sweep": [], "answers": 3, "decode": decode}))
    return str(path)


def test_reports_need_names_and_equal_settings(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.json"), write(tmp_path / "2.json", draft="other")
    assert list(read_reports([one, two], None)) == ["NGram NGram", "NGram other"]
    assert list(read_reports([one, two], ["x", "y"])) == ["x", "y"]
    with pytest.raises(UserError, match="give different ones with --names"):
        read_reports([one, one], None)
    with pytest.raises(UserError, match="found 1 names for 2 reports"):
        read_reports([one, two], ["x"])
    with pytest.raises(UserError, match="have different settings"):
        read_reports([one, write(tmp_path / "3.json", "b.jsonl")], ["x", "y"])
    with pytest.raises(UserError, match=r"expected a report of validate\.py"):
        read_reports([str(tmp_path)], None)


def test_a_report_is_not_overwritten(tmp_path: Path) -> None:
    one = write(tmp_path / "1.json")
    before = Path(one).read_bytes()
    with pytest.raises(UserError, match="is also a report"):
        main(make_parser().parse_args([one, "--html", one]))
    assert Path(one).read_bytes() == before


def test_reports_of_other_prompts_or_sampling_are_refused(tmp_path: Path) -> None:
    """Files of the same name, and the same questions at another temperature; a report without a digest is older."""
    one = write(tmp_path / "1.json", prompts_digest="aa")
    older = write(tmp_path / "2.json")
    assert list(read_reports([older, one, write(tmp_path / "3.json", prompts_digest="aa")], ["x", "y", "z"])) == list(
        "xyz"
    )
    with pytest.raises(UserError, match=r"different settings \(prompts_digest: aa, bb\)"):
        read_reports([older, one, write(tmp_path / "4.json", prompts_digest="bb"), older], list("wxyz"))
    with pytest.raises(UserError, match=r"different settings \(temperature: 0, 1\)"):
        read_reports([older, write(tmp_path / "5.json", temperature="1")], ["x", "y"])
