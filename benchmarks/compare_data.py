"""The same draft trained on other data: defaults of several runs of ablate_drafts.py against those of the first.

    python benchmarks/compare_data.py runs/greedy runs/mixed runs/asked

The runs differ in --answer-temperature, --user-questions or --data, not in base and questions. Seeds are pooled, and
changes have paired intervals; with --temperature, the sampled answers get a table of their own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.acceptance_page import Line, read_results, setting_of, settings_table
from megatron_spec import cli
from megatron_spec.config import UserError

DATA = ("answer_temperature", "user_questions", "data", "conversations", "answer_tokens")
"""Settings that may differ."""


def compared(runs: dict[str, list[Line]], kind: str) -> str:
    """The table of the greedy ("measured") or sampled answers; '' unless all runs have them."""
    seeds = {
        run: [x for x in lines if x["kind"] == kind and setting_of(x["name"]) == "ablation defaults"]
        for run, lines in runs.items()
    }
    return settings_table(seeds, next(iter(runs))) if all(seeds.values()) else ""


def read_runs(folders: list[str]) -> dict[str, list[Line]]:
    """Their results. Raises UserError unless they differ in the training data alone."""
    runs = {folder: read_results(Path(folder) / "results.jsonl") for folder in folders}
    first = runs[folders[0]][0]
    for folder, (settings, *_) in runs.items():
        keys = sorted({*first, *settings} - {*DATA, "at"})
        if changed := [key for key in keys if first.get(key) != settings.get(key)]:
            raise UserError(
                f"{folder}: another {', '.join(changed)} than {folders[0]}: compare runs that differ in data"
            )
    return runs


def main(args: argparse.Namespace) -> None:
    """Print the tables."""
    runs = read_runs(args.runs)
    for kind, title in (("measured", "Greedy answers"), ("sampled", "Sampled answers")):
        if text := compared(runs, kind):
            print(f"{title}:\n\n{text}")


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="DIR", help="--output of the runs")
    return p


if __name__ == "__main__":
    cli.run(make_parser(), main)
