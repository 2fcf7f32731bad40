"""docs/megatron_flags.md from its table: python tools/megatron_flags_table.py [--write]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_spec.config.megatron_flags import table

HEAD = """# Flags of Megatron-LM

`--help` of each script lists the flags with the same meaning as in Megatron-LM (`--tensor-model-parallel-size`,
`--micro-batch-size`, `--lr`, ...); underscores work in place of dashes. Other
common flags are renamed, refused, fixed, checked or not needed.

"""


def page() -> str:
    """The complete page."""
    return HEAD + table()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write docs/megatron_flags.md; default: print it, exit code 1 if outdated"
    )
    args = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / "docs" / "megatron_flags.md"
    if args.write:
        path.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
        sys.exit(not path.is_file() or path.read_text(encoding="utf-8") != page())
