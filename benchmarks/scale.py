"""Layouts on several GPUs: losses and gradients against one GPU, and throughput per GPU at the Llama-3.1-8B shape.

    python benchmarks/scale.py --gpus 2 --output two.json          # all layouts of two GPUs against one: tables
    python benchmarks/scale.py --gpus 2 --layouts tp2 tp2sp        # these layouts only (--no-equality, --no-speed)
    python benchmarks/scale.py --gpus 2 --tiny                     # the same with tiny models, on CPUs
    torchrun --nproc-per-node 4 benchmarks/scale.py pp4 --model 70b --no-equality --output large.json

A layout is written tp2pp2cp1, then sp for sequence parallelism, te for Transformer Engine's layers in base and draft,
@16384x1 for another sequence length and micro-batch size in the throughput test; the other GPUs are data parallel.
Equality: a small model with weights on disk, in fp32 and bf16. Throughput: random weights, every token supervised.
`--reference` is written by the layout `one` and read by the others; --gpus does both, in child processes
(`scale_proof.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scale_proof
from megatron_spec.planning.paths import PATHS

OF_ONE_CALL = (
    "speed_of", "model", "seq_length", "micro_batch_size", "micro_batches", "features_ahead", "ttt_steps", "warmup",
    "steps",
)  # fmt: skip
"""Flags of a call that names its layouts."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("layouts", nargs="*")
    p.add_argument("--gpus", type=int, metavar="N", help="every layout of N GPUs against one GPU, as tables")
    p.add_argument("--layouts", dest="only", nargs="+", metavar="LAYOUT", help="with --gpus: these of its layouts")
    p.add_argument("--reference", type=Path, help="folder of the small base and the results of one GPU")
    p.add_argument("--no-equality", action="store_true")
    p.add_argument("--no-speed", action="store_true")
    p.add_argument("--speed-of", nargs="+", metavar="LAYOUT", help="layouts for the throughput test (default: all)")
    p.add_argument("--model", choices=["8b", "70b"], default="8b")
    p.add_argument("--seq-length", type=int, default=4096)
    p.add_argument("--micro-batch-size", type=int, default=2)
    p.add_argument("--micro-batches", type=int, default=2, help="micro-batches per rank and step")
    p.add_argument("--features-ahead", type=int, default=0)
    p.add_argument("--ttt-steps", type=int, default=7)
    p.add_argument("--warmup", type=int, default=3, help="steps")
    p.add_argument("--steps", type=int, default=6)
    off = "fast paths that are off in the throughput test"
    p.add_argument("--without", nargs="+", choices=PATHS, default=[], metavar="PATH", help=off)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    args = p.parse_args(argv)
    if args.gpus is not None and (unread := [n for n in OF_ONE_CALL if getattr(args, n) != p.get_default(n)]):
        p.error(f"--gpus sets these itself: leave out {', '.join('--' + n.replace('_', '-') for n in unread)}")
    if args.tiny:
        args.seq_length, args.ttt_steps, args.steps, args.warmup = 64, 2, 2, 1
    if (args.gpus is None) == (not args.layouts):
        p.error("give layouts, or --gpus N for all of them")
    if args.gpus is None and args.only:
        p.error("--layouts selects among the layouts of --gpus")
    if args.gpus is None and not args.no_equality and args.reference is None:
        p.error("--reference is needed for equality (or --no-equality)")
    return args


def main() -> None:
    """Every layout in child processes, or some in this one."""
    args = parse()
    if args.gpus is not None:
        kinds = [kind for kind in ("equality", "speed") if not getattr(args, f"no_{kind}")]
        chosen = scale_proof.Chosen(args.gpus, kinds, args.only, args.tiny, tuple(args.without))
        raise SystemExit(scale_proof.prove(chosen, args.output, args.reference))
    from benchmarks import measure_layouts  # --help does without what it imports

    measure_layouts.main(args)


if __name__ == "__main__":
    main()
