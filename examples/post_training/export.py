"""Write a draft (and its base, when that is fake-quantised) in the formats that serving engines load, and check it.

    python export.py --export-dir OUT --export-extra-modules --load DIR

OUT/draft holds the draft (bf16, or fp8 when the checkpoint is quantised), OUT/base the fp8 base, and OUT/trtllm.yaml a
TensorRT-LLM configuration (EAGLE-3). --export-format speculators writes OUT/draft in the format of that library;
trtllm-legacy writes OUT/trtllm, base and Medusa heads together with one file per rank. What was written is read back
and compared with the model in memory before it appears.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ExportRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, ExportRun)


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.export import export

    export(args.run)


if __name__ == "__main__":
    cli.run(parser(), main)
