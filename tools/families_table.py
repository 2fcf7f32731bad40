"""The table of base families in docs/families.md, from test results: python tools/families_table.py [--write].

The tests compare `tests/support_results.json` with their own findings on every run; MEGATRON_SPEC_WRITE_SUPPORT=1 makes
them write it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_spec.families.families import FAMILIES, REFUSED  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
RESULTS = ROOT / "tests" / "support_results.json"
LAYOUTS = ("TP 2", "TP 2 SP", "PP 2", "EP 2")
DRAFTS = ("eagle3", "eagle1", "eagle-mtp", "medusa")
_BETWEEN = re.compile(r"(<!--families-->\n).*?(<!--/families-->)", re.DOTALL)


def _cell(found: dict[str, Any], name: str) -> str:
    return "-" if name not in found else "yes" if found[name] else "no"


def _chain(steps: list[str] | None) -> str:
    """Last step of the chain that a kind of draft was tested with on a family."""
    if not steps:
        return "-"
    return "whole chain" if {"fp8", "export", "validate"} <= set(steps) else steps[-1]


def table(results: dict[str, Any]) -> str:
    """The Markdown table ('-': not tested), followed by the refused architectures with reasons."""
    columns = ["architecture", "models", *LAYOUTS, "drafts", *DRAFTS]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for family in FAMILIES:
        layouts, chain = results["layouts"].get(family.name, {}), results["chain"].get(family.name, {})
        cells = [family.architecture, family.models, *(_cell(layouts, name) for name in LAYOUTS)]
        cells += [_cell(layouts, "drafts"), *(_chain(chain.get(name)) for name in DRAFTS)]
        lines.append("| " + " | ".join(cells) + " |")
    refused = [f"- {name} {reason}" for name, reason in REFUSED.items()]
    return "\n".join([*lines, "", "Refused by name:", "", *refused]) + "\n"


def updated(page: str) -> str:
    """The page with the current table."""
    assert _BETWEEN.search(page), "docs/families.md lacks <!--families--> and <!--/families-->"
    text = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    return _BETWEEN.sub(lambda m: m[1] + text + m[2], page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write",
        action="store_true",
        help="write it into docs/families.md; default: print it, exit code 1 if outdated",
    )
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    if args.write:
        PAGE.write_text(updated(text), encoding="utf-8")
    else:
        print(table(json.loads(RESULTS.read_text(encoding="utf-8"))), end="")
        sys.exit(updated(text) != text)
