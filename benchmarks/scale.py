"""Layouts on several GPUs: losses and gradients against one GPU, and throughput per GPU at the shape of a known base.

    python benchmarks/scale.py --gpus 2 --output two.json          # all layouts of two GPUs against one: tables
    python benchmarks/scale.py --gpus 2 --layouts tp2 tp2sp        # these layouts only (--no-equality, --no-speed)
    python benchmarks/scale.py --gpus 2 --model qwen3-30b-a3b --layouts dp2 ep2 --ttt-steps 1    # a base with experts
    python benchmarks/scale.py --gpus 2 --tiny                     # the same with tiny models, on CPUs
    torchrun --nproc-per-node 4 benchmarks/scale.py pp4 --model 70b --no-equality --output large.json
    torchrun --nproc-per-node 2 benchmarks/scale.py ep2 --model qwen3-30b-a3b --no-equality

A layout is written tp2pp2cp1ep1, then sp for sequence parallelism, te for Transformer Engine's layers in base and draft
(equality alone), @16384x1 for another sequence length and micro-batch size in the throughput test; the other GPUs are
data parallel. Experts are spread over ranks that are data or context parallel: ep2 on two GPUs has two micro-batches at
a time. Equality: a small model with weights on disk, in fp32 and bf16; one with experts if the model has them.
Throughput: random weights, every token supervised.
`--reference` is written by the layout `one` and read by the others; --gpus does both, in child processes
(`scale_proof.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import layouts, scale_proof, small_base
from megatron_spec.config import UserError
from megatron_spec.planning.paths import PATHS

OF_ONE_CALL = (
    "speed_of", "seq_length", "micro_batch_size", "micro_batches", "features_ahead", "warmup", "steps",
)  # fmt: skip
"""Flags of a call that names its layouts."""
FULL = {"seq_length": 4096, "ttt_steps": 7, "warmup": 3, "steps": 6}
TINY = {"seq_length": 64, "ttt_steps": 2, "warmup": 1, "steps": 2}
"""Defaults, and those of --tiny."""


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
    p.add_argument("--model", choices=list(layouts.MODELS), default="8b", help="shape of the base: default 8b")
    p.add_argument("--seq-length", type=int)
    p.add_argument("--micro-batch-size", type=int, default=2)
    p.add_argument("--micro-batches", type=int, default=2, help="micro-batches per rank and step")
    p.add_argument("--features-ahead", type=int, default=0)
    p.add_argument("--ttt-steps", type=int, help="in the throughput test: default 7")
    p.add_argument("--warmup", type=int, help="steps")
    p.add_argument("--steps", type=int)
    off = "fast paths that are off in the throughput test"
    p.add_argument("--without", nargs="+", choices=PATHS, default=[], metavar="PATH", help=off)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    args = p.parse_args(argv)
    try:
        _check(args, [n for n in OF_ONE_CALL if getattr(args, n) != p.get_default(n)])
    except UserError as e:
        p.error(str(e))
    for name, value in (TINY if args.tiny else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _check(args: argparse.Namespace, of_one_call: list[str]) -> None:
    """Raise UserError for flags that contradict one another, and for layouts that cannot run."""
    if args.gpus is not None and of_one_call:
        flags = ", ".join("--" + n.replace("_", "-") for n in of_one_call)
        raise UserError(f"--gpus sets these itself: leave out {flags}")
    if (args.gpus is None) == (not args.layouts):
        raise UserError("give layouts, or --gpus N for all of them")
    if args.gpus is not None:
        return scale_proof.check(args.gpus, args.model, args.only, args.tiny)
    if args.only:
        raise UserError("--layouts selects among the layouts of --gpus")
    timed = [] if args.no_speed else args.speed_of or args.layouts
    if unknown := [x for x in timed if x not in args.layouts]:
        raise UserError(f"--speed-of: found {' '.join(unknown)}, expected some of {' '.join(args.layouts)}")
    if engine := [x for x in timed if layouts.parse(x).engine]:
        raise UserError(f"{' '.join(engine)}: te is for equality alone: add --no-speed, or leave te out")
    experts, world = layouts.has_experts(args.model), int(os.environ.get("WORLD_SIZE", "1"))
    if not args.no_equality:
        if args.reference is None:
            raise UserError("--reference is needed for equality (or --no-equality)")
        small_base.check_reference(args.reference, experts, args.tiny, writes=args.layouts[0] == "one")
        for layout in args.layouts:
            layouts.check(layout, small_base.small_shape(experts, args.tiny), world)
    for layout in timed:
        layouts.check(layout, layouts.speed_shape(args.model, args.tiny)[1], world)


def main() -> None:
    """Every layout in child processes, or some in this one."""
    args = parse()
    if args.gpus is not None:
        kinds = [kind for kind in ("equality", "speed") if not getattr(args, f"no_{kind}")]
        chosen = scale_proof.Chosen(
            args.gpus, kinds, args.only, args.tiny, tuple(args.without), args.model, args.ttt_steps
        )
        raise SystemExit(scale_proof.prove(chosen, args.output, args.reference))
    from benchmarks import measure_layouts  # --help does without what it imports

    measure_layouts.main(args)


if __name__ == "__main__":
    main()
