"""Fake-quantise base and draft of a checkpoint: attach fp8 quantisers and calibrate their ranges on conversations.

    python quantize.py --export-quant-cfg fp8 --load DIR --save DIR2 --data train.jsonl

Calibration runs every draft step, so that the draft's ranges cover its fed-back features. Continue with finetune.py
for quantisation-aware training, or with export.py.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import QuantizeRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, QuantizeRun)


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.quantize import quantize

    quantize(args.run)


if __name__ == "__main__":
    cli.run(parser(), main)
