"""Generate the base's answers to prompts, with or without a draft, as training conversations.

    python generate.py --base BASE --data prompts.jsonl --output train.jsonl            # the base alone
    python generate.py --base BASE --synthesize 10000 --output train.jsonl              # its own questions; or both
    python generate.py --load DIR --data prompts.jsonl --output answers.jsonl           # with a draft: the same text

Every finished conversation is written at once; a later run with the same --output resumes.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import GenerateRun
from megatron_spec.config import UserError


def parser() -> cli.Parser:
    return cli.Parser(__doc__, GenerateRun)


def main(args: argparse.Namespace) -> None:
    decode = args.run.decode
    drafted = args.run.load or decode.speculative_model or decode.decoding_type
    if decode.sets("max_draft_len") and not drafted:
        raise UserError(
            "--max-draft-len is for a draft, and without --load there is none: leave it out, or give --load, "
            "--speculative-model or --decoding-type"
        )
    from megatron_spec.commands.decode import generate

    generate(args.run)


if __name__ == "__main__":
    cli.run(parser(), main)
