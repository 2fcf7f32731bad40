"""Gain of packing, and costs of stored features and checkpoints, for any base.

    python benchmarks/costs.py --base SMOLLM2 --output costs.json
    python benchmarks/costs.py --base /models/llama-3.1-8b --bf16 --seq-length 4096 --draft-vocab-size 32000

Conversations are random tokens with the length distribution of chat data (log-normal, a quarter below half the median,
truncated at --seq-length), half of each supervised. Every step reads --micro-batch-size rows; padding does not count as
tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_spec import cli


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--base", required=True, metavar="DIR", help="base in Hugging Face or Megatron format")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--seq-length", type=cli.at_least_one, default=1024)
    p.add_argument("--micro-batch-size", type=cli.at_least_one, default=4, help="rows per step")
    p.add_argument("--conversations", type=cli.at_least_one, default=48)
    p.add_argument("--ttt-steps", type=cli.at_least_one, default=3)
    p.add_argument("--draft-vocab-size", type=cli.at_least_one, default=8192)
    p.add_argument("--output", type=Path)
    return p


def main(args: argparse.Namespace) -> None:
    """Measure, print one line per result, write all results as JSON."""
    from benchmarks import measure_costs  # --help does without what it imports

    measure_costs.main(args)


if __name__ == "__main__":
    cli.run(make_parser(), main)
