"""Time of every product of a decoding layer, over the ways in which it may be divided, and of whole steps.

    python benchmarks/decode_products.py --output products.jsonl

First a line of JSON per base: milliseconds of a step (all layers and the head) with 1 row and with 5 (a verification)
by our kernels and with cuBLAS's products; whether a row alone has the bits that it has among five; microseconds of a
norm.

Then, for every product of a layer and the head, many divisions (`ops/tiles.Tiles`) are timed in CUDA graphs that go
through copies of the weights, more than the cache holds. Kernels are compiled in processes of their own first. One line
per product: microseconds and TB/s of weights of the division that `tiles_of` gives, of the fastest for both numbers of
rows together, and of cuBLAS (product alone); whether one row alone has the bits that it has
among five; the largest error against fp64, of the largest value. The last line has the sums over a base's layers, in
milliseconds, and the products that take more than 1.1 times as long as cuBLAS's. `--output`: everything that was timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_spec import cli

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BASES = {
    "Qwen2.5-Coder-0.5B": (24, 896, 1152, 4864, 151936), "SmolLM2-135M": (30, 576, 960, 1536, 49152),
    "8B": (32, 4096, 6144, 14336, 128256),
}  # fmt: skip
"""Layers, hidden size, outputs of the projection to queries, keys and values, size of the MLP, vocabulary."""
HEADS = {"Qwen2.5-Coder-0.5B": (14, 2, 64), "SmolLM2-135M": (9, 3, 64), "8B": (32, 8, 128)}
"""Query and key/value heads, head size."""
ROWS = (1, 5)


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--base", nargs="+", choices=tuple(BASES), help="default: all")
    p.add_argument("--most", type=cli.at_least_one, default=30, help="divisions of a product (default: 30)")
    p.add_argument("--seconds", type=float, default=40.0, help="start no further measurement after (default: 40)")
    p.add_argument("--processes", type=cli.at_least_one, default=min(16, os.cpu_count() or 1), help="that compile")
    p.add_argument("--output", metavar="JSONL", help="all that was timed, too")
    return p


def measure(args: argparse.Namespace) -> None:
    """Prints the lines."""
    from benchmarks import measure_products

    measure_products.measure(args)


if __name__ == "__main__":
    cli.run(make_parser(), measure)
