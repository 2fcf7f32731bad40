"""Make a draft model for a base: a new one, or a published one to train further.

    python convert_model.py --export-algorithm eagle --export-eagle-algorithm eagle3 --load BASE --save DIR
    python convert_model.py --export-algorithm dflash --load BASE --save DIR
    python convert_model.py --export-algorithm medusa --export-num-medusa-heads 4 --load BASE --save DIR
    python convert_model.py --draft FOLDER --load BASE --save DIR
    torchrun --nproc-per-node 4 convert_model.py --tensor-model-parallel-size 4 --load BASE --save DIR ...

BASE is a Hugging Face folder or a Megatron dist_checkpointing checkpoint. A reduced draft vocabulary comes from
tools/calibrate_draft_vocab.py. The base is referenced by path and content hash, not copied.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ConvertRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, ConvertRun)


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.convert import convert

    convert(args.run)


if __name__ == "__main__":
    cli.run(parser(), main)
