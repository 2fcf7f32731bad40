"""The README's table of layouts, from megatron_spec/planning/layouts.py: python tools/support_table.py [--write]."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_spec.planning.layouts import table

_PLACE = re.compile(r"(<!--support-->\n).*?(<!--/support-->)", re.DOTALL)


def updated(readme: str) -> str:
    """The README with the table of today."""
    assert _PLACE.search(readme), "README.md lacks <!--support--> and <!--/support-->"
    return _PLACE.sub(lambda m: m[1] + table() + m[2], readme)


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[1] / "README.md"
    text = path.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        path.write_text(updated(text), encoding="utf-8")
    else:
        print(table(), end="")
        sys.exit(updated(text) != text)
