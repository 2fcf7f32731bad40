"""The benchmark of fake quantisation runs on a CPU, and times a quantised step."""

from __future__ import annotations

import json

import pytest

from benchmarks import fake_quant


def test_tiny(capsys: pytest.CaptureFixture[str]) -> None:
    fake_quant.main(fake_quant.make_parser().parse_args(["--tiny", "--ttt-steps", "2", "--repeats", "1"]))
    report = json.loads(capsys.readouterr().out)
    assert report["with_s"] > 0 and report["without_s"] > 0 and "cost" in report and report["plain_gb_s"] > 0
