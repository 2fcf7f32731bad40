"""Inspect conversations as training data: lengths, supervised tokens, tokens lost to truncation.

    python tools/inspect_data.py --data train.jsonl --tokenizer BASE --seq-length 2048 --samples 3

Prints tables and the first samples with the assistant's (supervised) tokens in green, or in double brackets if the
output is not a terminal. Loss masks that are empty or cover everything are refused with the line number. Tokenised data
are cached beside the data, and reused in training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from megatron_spec import cli
from megatron_spec.commands.runs import ChatText
from megatron_spec.config import UserError


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--data", required=True, metavar="JSONL", help="conversations")
    p.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of the base or of a tokenizer")
    p.add_argument(
        "--seq-length", type=int, default=2048, help="truncate conversations to this many tokens (default: %(default)s)"
    )
    p.add_argument(
        "--samples", type=cli.at_least_zero, default=3, metavar="N", help="print the first N (default: %(default)s)"
    )
    p.add_fields(ChatText, "chat_template_kwargs")
    p.add_argument("--data-cache-path", metavar="DIR", help="folder for tokenised data (default: beside the data)")
    p.add_argument(
        "--num-workers",
        type=cli.at_least_one,
        metavar="N",
        help="tokeniser processes (default: by the size of the data)",
    )
    p.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    return p


def inspect_data(args: argparse.Namespace) -> None:
    """Tokenise if necessary, and report. Raises UserError for data that cannot be trained on."""
    from megatron_spec.commands.data import open_dataset
    from megatron_spec.data.inspect import inspect, pieces
    from megatron_spec.data.tokenizer import load_tokenizer

    dataset = open_dataset(
        args.data, args.tokenizer, args.seq_length, args.data_cache_path,
        template_kwargs=args.chat_template_kwargs, workers=args.num_workers,
    )  # fmt: skip
    tokenizer = load_tokenizer(args.tokenizer)
    report = inspect(dataset)
    if args.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
        return
    try:
        from rich.console import Console
    except ImportError:
        raise UserError("rich is not installed: pip install 'megatron-spec[data]', or use --json") from None
    console = Console(soft_wrap=True, highlight=False)
    for table in tables(report, args.seq_length):
        console.print(table)
    for index in range(min(args.samples, len(dataset))):
        console.print(sample_text(dataset[index].where, pieces(dataset, index, tokenizer), console.is_terminal))


def tables(report: Any, seq_length: int) -> list[Any]:
    """The report as tables of rich."""
    from rich.table import Table

    from megatron_spec.data.inspect import QUANTILES

    figures = Table("figure", "value", title="conversations")
    packed = {
        "rows with --packing": report.packed_rows,
        "share of their tokens without padding": round(report.packed_fill, 4),
    }
    lost = {f"tokens after {seq_length}": report.lost_tokens}
    dropped = {f"dropped: {reason}": count for reason, count in report.dropped.items()}
    for name, value in {**report.statistics, **lost, **dropped, **packed}.items():
        figures.add_row(name.replace("_", " "), str(value))
    lengths = Table("", *(f"{q:.0%}" for q in QUANTILES), title="tokens, quantiles")
    lengths.add_row("conversation, not truncated", *map(str, report.lengths))
    lengths.add_row("answer", *map(str, report.answer_lengths))
    turns = Table("assistant turns", "conversations", title="turns")
    shown = sorted(report.turns.items())
    for number, count in shown[:10]:
        turns.add_row(str(number), str(count))
    if len(shown) > 10:
        turns.add_row(f"more than {shown[9][0]}", str(sum(count for _, count in shown[10:])))
    return [figures, lengths, turns]


def sample_text(where: str, parts: list[tuple[str, bool]], styled: bool) -> Any:
    """One sample in two colours, or with brackets around supervised tokens."""
    from rich.text import Text

    text = Text(f"\n{where}\n", style="bold")
    for piece, supervised in parts:
        text.append(
            piece if styled or not supervised else f"\u27e6{piece}\u27e7",
            style="not bold green underline" if supervised else "not bold dim",
        )
    return text


if __name__ == "__main__":
    cli.run(make_parser(), inspect_data)
