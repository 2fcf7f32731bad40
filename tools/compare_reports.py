"""Compare reports of validate.py in one HTML page: several drafters, or one draft before and after quantisation.

python tools/compare_reports.py eagle3.json medusa.json ngram.json --names EAGLE-3 Medusa NGram --html compare.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.evaluation import html
from megatron_spec.runtime.files import read_json

ASKED = ("prompts", "prompts_digest", "answers", "max_new_tokens", "temperature", "top_k", "top_p")


def read_reports(paths: Sequence[str], names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Name -> report. Raises UserError for files that are not reports, or not of the same questions."""
    if names and len(names) != len(paths):
        raise UserError(f"--names: found {len(names)} names for {len(paths)} reports, expected one per report")
    found: dict[str, dict[str, Any]] = {}
    for i, path in enumerate(paths):
        try:
            report = read_json(path)
            about, _ = report["about"], report["sweep"]
        except UserError as e:
            raise UserError(f"expected a report of validate.py: {e}") from None
        except (KeyError, TypeError) as e:
            raise UserError(f"{path}: expected a report of validate.py ({type(e).__name__}: {e})") from None
        name = names[i] if names else f"{about.get('decoding_type')} {about.get('draft')}"
        if name in found:
            raise UserError(f"two reports have the name {name!r}: give different ones with --names")
        found[name] = report
    asked = [_asked(r) for r in found.values()]
    values = {name: list(dict.fromkeys(a[name] for a in asked if name in a)) for name in ASKED}
    if differing := [f"{name}: {', '.join(map(str, v))}" for name, v in values.items() if len(v) > 1]:
        raise UserError(
            f"the reports have different settings ({'; '.join(differing)}): run validate.py with the same --data, "
            "--num-prompts, --max-new-tokens and way of sampling for all drafts"
        )
    return found


def _asked(report: dict[str, Any]) -> dict[str, Any]:
    """What figures that stand side by side have in common. An older report has no digest of its prompts."""
    every = {**report["decode"], **report["about"], "answers": report["answers"]}
    return {name: every[name] for name in ASKED if name in every}


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("reports", nargs="+", metavar="JSON", help="report of validate.py --output")
    p.add_argument(
        "--names", nargs="+", metavar="NAME", help="names of the drafters (default: decoding type and draft)"
    )
    p.add_argument("--html", required=True, metavar="HTML", help="output page")
    return p


def main(args: argparse.Namespace) -> None:
    """Write the page. Raises UserError if it would replace a report."""
    if Path(args.html).resolve() in {Path(path).resolve() for path in args.reports}:
        raise UserError(f"--html {args.html} is also a report: it would be overwritten")
    html.require_page(args.html)
    html.write_html(args.html, read_reports(args.reports, args.names))
    sys.stdout.write(f"{args.html}\n")


if __name__ == "__main__":
    cli.run(make_parser(), main)
