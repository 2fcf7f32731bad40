"""Let the base answer prompts, with or without a draft; the answers are training conversations.

    python generate.py --base BASE --data prompts.jsonl --output train.jsonl            # synthesise with the base alone
    python generate.py --load DIR --data prompts.jsonl --output answers.jsonl           # the same text, with a draft

Every finished conversation is on disk at once; a second run with the same --output continues.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--base", metavar="BASE", help="base model (needed without --load, or when it moved)")
    p.add_argument("--load", metavar="DIR", help="draft checkpoint to speculate with")
    p.add_argument("--data", required=True, metavar="JSONL", help="prompts")
    p.add_argument("--output", required=True, metavar="JSONL", help="conversations with answers")
    p.add_argument("--num-prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    p.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the base's)")
    p.add_argument("--bf16", action="store_true", help="bfloat16 weights (default: float32)")
    p.add_config(DecodeConfig)
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.chain.decode import generate

    generate(
        args.data,
        args.output,
        load=args.load,
        base=args.base,
        num_prompts=args.num_prompts,
        tokenizer=args.tokenizer,
        bf16=args.bf16,
        decode=cli.config_from(DecodeConfig, args),
        parallel=cli.config_from(ParallelConfig, args),
    )


if __name__ == "__main__":
    cli.run(parser(), main)
