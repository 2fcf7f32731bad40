"""Let the base answer prompts, with or without a draft; the answers are training conversations.

    python generate.py --base BASE --data prompts.jsonl --output train.jsonl            # synthesise with the base alone
    python generate.py --base BASE --synthesize 10000 --output train.jsonl              # it writes the questions, too
    python generate.py --load DIR --data prompts.jsonl --output answers.jsonl           # the same text, with a draft

Every finished conversation is on disk at once; a second run with the same --output continues.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ParallelConfig, UserError


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--base", metavar="BASE", help="base model (needed without --load, or when it moved)")
    p.add_argument("--load", metavar="DIR", help="draft checkpoint to speculate with")
    p.add_argument("--data", metavar="JSONL", help="prompts")
    p.add_argument("--synthesize", type=cli.at_least_one, metavar="N", help="instead: the base writes N questions")
    p.add_argument("--question-temperature", type=float, metavar="T", help="for --synthesize (default: 1)")
    p.add_argument("--output", required=True, metavar="JSONL", help="conversations with answers")
    p.add_argument("--num-prompts", type=cli.at_least_one, metavar="N", help="use the first N prompts (default: all)")
    p.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the base's)")
    p.add_template_flag()
    p.add_argument("--bf16", action="store_true", help="bfloat16 weights (default: float32)")
    default = DecodeConfig().max_draft_len
    p.add_argument("--max-draft-len", type=int, metavar="INT", help=f"draft tokens, with --load (default: {default})")
    p.add_config(DecodeConfig, skip=["max_draft_len"])
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    drafted = args.load or args.speculative_model or args.decoding_type
    if args.max_draft_len is not None and not drafted:
        raise UserError(
            "--max-draft-len is for a draft, and without --load there is none: leave it out, or give --load, "
            "--speculative-model or --decoding-type"
        )
    given = {} if args.max_draft_len is None else {"max_draft_len": args.max_draft_len}
    del args.max_draft_len
    decode = cli.config_from(DecodeConfig, args, **given)
    from megatron_spec.commands.decode import generate

    generate(
        args.data,
        args.output,
        load=args.load,
        base=args.base,
        num_prompts=args.num_prompts,
        synthesize=args.synthesize,
        question_temperature=args.question_temperature,
        tokenizer=args.tokenizer,
        bf16=args.bf16,
        decode=decode,
        parallel=cli.config_from(ParallelConfig, args),
        template_kwargs=args.chat_template_kwargs,
    )


if __name__ == "__main__":
    cli.run(parser(), main)
