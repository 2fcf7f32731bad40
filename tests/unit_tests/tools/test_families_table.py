"""The README shows what the tests of the families found (which compare the file of findings with their own run)."""

from __future__ import annotations

import json
from pathlib import Path

from tools.families_table import RESULTS, table, updated

README = Path(__file__).resolve().parents[3] / "README.md"


def test_readme_shows_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run: python tools/families_table.py --write"


def test_what_failed_or_did_not_run_is_not_a_yes() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    results["layouts"]["phi3"]["PP 2"] = False
    del results["chain"]["phi3"]
    row = next(line for line in table(results).splitlines() if "Phi3ForCausalLM" in line and line.startswith("|"))
    assert [cell.strip() for cell in row.split("|")][3:-1] == ["yes", "yes", "no", "-", "yes", *"----"]
