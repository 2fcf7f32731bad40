"""Cost of fp8 fake quantisation: the rounding alone, plain and as a kernel, and a draft step with and without it.

    python benchmarks/fake_quant.py                       # Llama-3.1-8B's draft shape, on a GPU
    python benchmarks/fake_quant.py --tiny                # a tiny shape: works on a CPU

The draft step is forward and backward on random features, by the hand-written unroll (`drafts/fused_unroll.py`) and by
the plain one; the base does not run. `cost` is the share that fake quantisation adds to the step of training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_spec import cli
from megatron_spec.config import UserError


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--ttt-steps", type=cli.at_least_one, default=7)
    p.add_argument("--repeats", type=cli.at_least_one, default=5, help="number of timings, for the median")
    return p


def main(args: argparse.Namespace) -> None:
    """Measure and print one JSON object."""
    from benchmarks import measure_fake_quant  # --help does without what it imports
    from megatron_spec.runtime import platform

    if not args.tiny and not platform.has_cuda():
        raise UserError("no GPU was found, expected one: --tiny runs in miniature on a CPU")
    measure_fake_quant.main(args)


if __name__ == "__main__":
    cli.run(make_parser(), main)
