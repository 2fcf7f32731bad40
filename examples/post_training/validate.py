"""Measure the acceptance length of a draft: the base decodes alone and with the draft, and the texts must be identical.

    python validate.py --load DIR --data prompts.jsonl --max-draft-len 3 --output report.json

Prompts are chat JSON lines or question files with `turns`.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint (plain or quantised)")
    p.add_argument("--data", required=True, metavar="JSONL", help="prompts")
    p.add_argument("--output", metavar="JSON", help="where the report goes (default: DIR/validate.json)")
    p.add_argument("--num-prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    p.add_model_flags()
    p.add_argument(
        "--fp64", action="store_true", help="float64: a fake-quantised base gives the same text in every row shape"
    )
    p.add_config(DecodeConfig)
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.chain.decode import validate

    validate(
        args.load,
        args.data,
        output=args.output,
        num_prompts=args.num_prompts,
        base=args.base,
        tokenizer=args.tokenizer,
        bf16=args.bf16,
        fp64=args.fp64,
        decode=cli.config_from(DecodeConfig, args),
        parallel=cli.config_from(ParallelConfig, args),
    )


if __name__ == "__main__":
    cli.run(parser(), main)
