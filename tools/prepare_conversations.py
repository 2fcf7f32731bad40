"""Convert and clean conversations from other sources to JSON lines for training.

    python tools/prepare_conversations.py in1.json in2.jsonl --output train.jsonl
    python tools/prepare_conversations.py ultrachat --output train.jsonl --held-out test.jsonl --held-out-share 0.05
    python tools/prepare_conversations.py OWNER/NAME --split train --output prompts.jsonl --make-prompts

A source is a JSON, JSON lines or parquet file (.gz too), a folder of them, OWNER/NAME of a dataset on the Hugging Face
hub, or a name: daring-anteater, sharegpt, ultrachat, magpie, mt_bench (prompts). Unusable conversations are dropped and
counted by reason; duplicates are removed. Ids are hashes of the content, so they and the split do not depend on the
order or number of sources. An interrupted run resumes when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_spec import cli
from megatron_spec.config import UserError

if TYPE_CHECKING:
    from megatron_spec.data.prepare import Report


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("sources", nargs="+", metavar="SOURCE", help="file, folder, OWNER/NAME on the hub, or a known name")
    p.add_argument("--output", required=True, metavar="JSONL", help="conversations, or prompts")
    p.add_argument("--split", metavar="NAME", help="split of datasets (default: train, or that of the known name)")
    p.add_argument("--held-out", metavar="JSONL", help="file for the held-out part")
    p.add_argument("--held-out-share", type=float, metavar="SHARE", help="share held out (default: 0.05)")
    p.add_argument("--make-prompts", action="store_true", help="keep only the prompts, for the base to answer")
    p.add_argument(
        "--max-characters",
        type=cli.at_least_one,
        default=0,
        metavar="N",
        help="drop longer conversations (default: no limit)",
    )
    p.add_argument(
        "--num-workers", type=cli.at_least_one, metavar="N", help="processes (default: all for large inputs)"
    )
    return p


def prepare(args: argparse.Namespace) -> None:
    """Read, clean, write, report. Raises UserError for unreadable input or if nothing is left."""
    from megatron_spec.data import prepare as library
    from megatron_spec.data.cleaning import CleanOptions
    from megatron_spec.data.sources import find_sources

    share = 0.05 if args.held_out_share is None else args.held_out_share
    if not 0 < share < 1:
        raise UserError(f"--held-out-share {share}: expected a number between 0 and 1")
    if args.held_out_share is not None and args.held_out is None:
        raise UserError("--held-out-share: nothing is held out without --held-out FILE")
    sources = [source for name in args.sources for source in find_sources(name, args.split)]
    if args.split is not None and not any(source.hub or source.split for source in sources):
        raise UserError("--split is for datasets on the hub or of save_to_disk: leave it out with files")
    held_out = Path(args.held_out) if args.held_out else None
    options = CleanOptions(args.make_prompts, args.max_characters)
    report = library.prepare(sources, Path(args.output), options, held_out, share, args.num_workers)
    say(report, "prompts" if args.make_prompts else "conversations")


def say(report: Report, what: str) -> None:
    """Print what was written, dropped and corrected."""
    for path, lines in report.written.items():
        sys.stdout.write(f"{lines} {what} in {path}\n")
    for title, counts in (("dropped", report.dropped), ("corrected", report.repairs)):
        sys.stdout.write(f"{counts.total()} {title}{':' if counts else ''}\n")
        for reason, count in counts.most_common():
            example = report.examples.get(reason) if title == "dropped" else None
            sys.stdout.write(f"  {count} x {reason}{f' (first: {example})' if example else ''}\n")
    sys.stdout.write(f"{report.read} read\n")


if __name__ == "__main__":
    cli.run(make_parser(), prepare)
