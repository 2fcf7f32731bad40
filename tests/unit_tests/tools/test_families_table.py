"""docs/families.md shows the findings of the family tests, which compare them with every run."""

from __future__ import annotations

import json

from tools.families_table import PAGE, RESULTS, table, updated


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert updated(text) == text, "run: python tools/families_table.py --write"


def test_failed_and_missing_runs_are_not_yes() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    results["layouts"]["phi3"]["PP 2"] = False
    del results["chain"]["phi3"]
    row = next(line for line in table(results).splitlines() if "Phi3ForCausalLM" in line and line.startswith("|"))
    assert [cell.strip() for cell in row.split("|")][3:-1] == ["yes", "yes", "no", "-", "yes", *"----"]
