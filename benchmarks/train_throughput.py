"""Speed of training at the shape of a base (Llama-3.1-8B), random weights, through the package's own classes.

    python benchmarks/train_throughput.py --seq-length 4096 2048 --ttt-steps 7 3 --output bench.json
    python benchmarks/train_throughput.py --offline         # features from disk; the base does not run
    python benchmarks/train_throughput.py --shape qwen3-8b  # another base (benchmarks/shapes.py)
    python benchmarks/train_throughput.py --step-weights d-pace
    python benchmarks/train_throughput.py --plain           # the same in torch's own operations, for comparison
    python benchmarks/train_throughput.py --draft dflash --draft-layers 5 --block-size 8 --anchors 512
    python benchmarks/train_throughput.py --shape qwen2.5-0.5b --draft dspark --loss ce_l1 --without loss_kernel
    python benchmarks/train_throughput.py --tiny            # in miniature, on a CPU

Every token is supervised, so no work is saved by dropping rows. Model FLOP utilisation counts the plain algorithm
(benchmarks/flops.py), whatever is saved by doing less, against the dense bf16 peak of one H100 SXM.

The JSON holds one entry per (length, steps): tokens_per_second, mfu, peak_gib, seq_length, ttt_steps, shares of a step
(base, teacher, head with loss, optimizer, draft_layer, and the parts of head), launches and synchronisations of one
step, kernels compiled after warm-up.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import SHAPES
from megatron_spec.config import LossKind, ObjectiveConfig, UserError
from megatron_spec.config.layers import BaseRecipe
from megatron_spec.config.training import BlockWeights, StepWeights
from megatron_spec.planning.paths import PATHS
from megatron_spec.runtime.optional import leave_out_engine

OF_BLOCK_DRAFTS = ("draft_layers", "block_size", "anchors", "block_weights", "backbone_weight")
OF_EAGLE = ("step_weights", "draft_vocab_size", "ttt_steps")
SIZES: dict[str, tuple[Any, Any]] = {
    "seq_length": ([4096, 2048], [64]), "ttt_steps": ([7, 3], [7, 3]), "draft_vocab_size": (32000, 128),
    "iters": (8, 1), "warmup": (2, 1), "repeats": (3, 1), "shape": ("llama-3.1-8b", "tiny"),
}  # fmt: skip
"""Flag -> its default, and that of --tiny."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq-length", type=int, nargs="+")
    parser.add_argument("--ttt-steps", type=int, nargs="+", help="of EAGLE-3")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--iters", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--repeats", type=int, help="the median of this many timings is reported")
    parser.add_argument("--base-fp8", action="store_true", help="run the base's linears and the teacher's head in fp8")
    parser.add_argument("--draft-fp8", action="store_true", help="run the draft's layer and head in fp8")
    parser.add_argument("--offline", action="store_true", help="features from disk; MFU is that of the draft's work")
    parser.add_argument("--store", type=Path, default=None, help="folder for the features of --offline (temporary)")
    parser.add_argument("--supervised-share", type=float, default=1.0, help="share of the tokens that is supervised")
    parser.add_argument("--draft", choices=["eagle3", "dflash", "dspark"], default="eagle3")
    parser.add_argument("--draft-layers", type=int, default=5, help="of a block draft")
    parser.add_argument("--block-size", type=int, default=8, help="slots of a block, the anchor included")
    parser.add_argument("--anchors", type=int, default=512, help="blocks drawn from a sequence")
    parser.add_argument("--loss", choices=get_args(LossKind), default=ObjectiveConfig.loss)
    parser.add_argument(
        "--step-weights", choices=get_args(StepWeights), default=ObjectiveConfig.step_weights, help="of EAGLE-3"
    )
    parser.add_argument("--block-weights", choices=get_args(BlockWeights), default=ObjectiveConfig.block_weights)
    parser.add_argument(
        "--backbone-weight", type=float, default=0.0, help="DSpark: share of the loss without Markov head"
    )
    parser.add_argument("--without", nargs="+", choices=PATHS, default=[], metavar="PATH", help="fast paths turned off")
    parser.add_argument("--only", nargs="+", default=None, metavar="SxT", help="pairs such as 4096x7, instead of all")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of the base")
    parser.add_argument("--plain", action="store_true", help="no fused unroll and no short forward of the base")
    parser.add_argument("--transformer-engine", action="store_true", help="the base of its modules")
    parser.add_argument("--fp8-recipe", choices=get_args(BaseRecipe), help="with --transformer-engine: its fp8")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one short timing: works on a CPU")
    parser.add_argument("--profile", default=None, metavar="PREFIX", help="write the time per kernel to PREFIX_S_T.txt")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    args = parser.parse_args(argv)
    for name in OF_BLOCK_DRAFTS if args.draft == "eagle3" else OF_EAGLE:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does nothing with --draft {args.draft}: leave it out")
    ignored = {
        "--fp8-recipe needs --transformer-engine": args.fp8_recipe and not args.transformer_engine,
        "--store needs --offline": args.store and not args.offline,
        "--tiny has a shape of its own: leave --shape out": args.tiny and args.shape,
        "--only has the lengths and steps: leave --seq-length and --ttt-steps out": args.only
        and (args.seq_length or args.ttt_steps),
    }
    for said, holds in ignored.items():
        if holds:
            parser.error(said)
    for name, (usual, tiny) in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, tiny if args.tiny else usual)
    for name, least in (("iters", 1), ("repeats", 1), ("micro_batch_size", 1), ("warmup", 0), ("draft_vocab_size", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")
    for name in ("seq_length", "ttt_steps"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {min(getattr(args, name))}: expected at least 1")
    if not 0 < args.supervised_share <= 1:
        parser.error(f"--supervised-share {args.supervised_share:g}: expected above 0, at most 1")
    for pair in args.only or ():
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", pair):
            parser.error(f"--only {pair}: expected a length and a number of steps, such as 4096x7")
    if args.output is not None and not args.output.resolve().parent.is_dir():
        parser.error(f"--output {args.output}: its folder does not exist")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure every (length, steps) pair; print a table, write JSON."""
    args = parse(argv)
    if not args.transformer_engine:
        leave_out_engine()  # like finetune.py
    from benchmarks import measure_training  # --help does without what it imports
    from megatron_spec.runtime import platform

    if not args.tiny and not platform.has_cuda():
        raise UserError("no GPU was found, expected one: --tiny runs in miniature on a CPU")
    if args.profile and not platform.has_cuda():
        raise UserError("--profile lists the kernels of a GPU, none was found: leave it out")
    return measure_training.main(args, argv or sys.argv[1:])


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        from megatron_spec.runtime import distributed

        distributed.shutdown()
        print(f"train_throughput.py: error: {e}", file=sys.stderr)
        sys.exit(2)
