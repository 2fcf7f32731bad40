"""The tables of layouts and of fast paths, from megatron_spec/planning: python tools/support_table.py [--write].

README.md shows the supported layouts, docs/scale.md also the reasons; docs/performance.md shows the fast paths, and
docs/transformer_engine.md where Transformer Engine's modules run (`te_table.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_spec.planning import paths  # noqa: E402
from megatron_spec.planning.layouts import table  # noqa: E402
from tools import te_table  # noqa: E402

_BETWEEN = re.compile(r"(<!--support-->\n).*?(<!--/support-->)", re.DOTALL)
_DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", _DOCS / "scale.md", _DOCS / "performance.md", _DOCS / "transformer_engine.md")


def short_table() -> str:
    """The table without its notes."""
    return re.sub(r"no \(\d+\)", "no", table().split("\n\n")[0]) + "\n"


def updated(page: Path) -> str:
    """The text of a page with the current table."""
    text = page.read_text(encoding="utf-8")
    assert _BETWEEN.search(text), f"{page.name} lacks <!--support--> and <!--/support-->"
    if page.name == "transformer_engine.md":
        return te_table.updated(text)
    makers = {"README.md": short_table, "scale.md": table, "performance.md": paths.table}
    return _BETWEEN.sub(lambda m: m[1] + makers[page.name]() + m[2], text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write it into the pages; default: print it, exit code 1 if outdated"
    )
    args = parser.parse_args()
    outdated = [page for page in PAGES if updated(page) != page.read_text(encoding="utf-8")]
    if args.write:
        for page in outdated:
            page.write_text(updated(page), encoding="utf-8")
    else:
        print(table(), end="")
        sys.exit(bool(outdated))
