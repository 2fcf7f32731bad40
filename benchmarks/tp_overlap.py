"""What tensor parallelism over two GPUs costs: layers of the base and steps of the draft, summed in several ways.

    torchrun --nproc-per-node 2 benchmarks/tp_overlap.py           # Llama-3.1-8B shape, 4096 x 2 tokens, about a minute
    torchrun --nproc-per-node 2 benchmarks/tp_overlap.py --tiny    # on CPUs

The base has eight layers here, the draft runs seven steps. `one GPU, halved` is half the time of the same work on one
GPU: what two would take if nothing were lost. `no sums` computes wrong values without communication, so its distance
from `one GPU, halved` is what halved products and repeated norms cost, and the distance of the other rows from it what
sums cost. The base's rows go in one or two pieces; the draft's weight gradients are computed beside sums, or after all
of them (`gradients after`). Printed first: the time of one sum alone, and
what each part of a step loses.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """All tables; the numbers as JSON at the end."""
    from megatron_spec import cli

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq-length", type=cli.at_least_one, help="(default: 4096; with --tiny: 64)")
    parser.add_argument("--micro-batch-size", type=cli.at_least_one, default=2)
    parser.add_argument("--rounds", type=cli.at_least_one, help="(default: 5; with --tiny: 2)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "2":
        parser.error(f"found {ranks} processes, expected 2: start it with torchrun --nproc-per-node 2")
    args.seq_length = args.seq_length or (64 if args.tiny else 4096)
    args.rounds = args.rounds or (2 if args.tiny else 5)
    from benchmarks import measure_overlap  # --help does without what it imports
    from megatron_spec.runtime import platform

    if not args.tiny and not platform.has_cuda():
        parser.error("no GPU was found, expected two: --tiny runs in miniature on CPUs")
    return measure_overlap.main(args)


if __name__ == "__main__":
    main()
    import torch.distributed as dist

    dist.destroy_process_group()
