"""Run the base once over the conversations and store the features that drafts are trained on.

    python offline_feature_extract.py --load DIR --data train.jsonl --output-dir FEATURES
    python finetune.py --load DIR --save DIR2 --offline-data FEATURES ...          # needs no base layers in memory

Several runs can share the work and the folder: run i of n gets --part i/n (a SLURM job array). An interrupted run
continues with the missing shards. Features of another base, template or length are refused.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ExtractRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, ExtractRun)


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.features import extract_features

    extract_features(args.run)


if __name__ == "__main__":
    cli.run(parser(), main)
