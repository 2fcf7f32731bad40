"""Export a draft (and its base, if fake-quantised) in the formats that serving engines load, and verify the export.

    python export.py --export-dir OUT --export-extra-modules --load DIR

OUT/draft is the draft (bf16, or fp8 if the checkpoint is quantised), OUT/base the fp8 base, and OUT/trtllm.yaml a
TensorRT-LLM configuration (EAGLE-3). --export-format speculators writes OUT/draft in the format of that library;
trtllm-legacy writes OUT/trtllm, base and Medusa heads together with one file per rank. Files are read back and compared
with the model in memory before they are published.
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
