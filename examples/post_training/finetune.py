"""Train the draft of a checkpoint on conversations; on a quantised checkpoint this is quantisation-aware training.

    python finetune.py --load DIR --save DIR2 --data train.jsonl --train-iters 1000 --lr 1e-4
    torchrun --nproc-per-node 8 finetune.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

Resumes when started again with the same --save. metrics.jsonl is written to --save; plot it with tools/plot_run.py.
"""

import argparse
import sys

from megatron_spec import cli
from megatron_spec.commands.runs import FinetuneRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, FinetuneRun)


def main(args: argparse.Namespace) -> None:
    if args.run.dry_run:
        from megatron_spec.commands.plan import plan

        print(plan(args.run))
        return
    from megatron_spec.commands.finetune import finetune

    if not finetune(args.run):
        sys.exit(3)  # saved and stopped by a signal: a scheduler restarts it


if __name__ == "__main__":
    cli.run(parser(), main)
