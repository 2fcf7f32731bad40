"""Measure the acceptance length of a draft: the base decodes alone and with the draft, and the texts must be identical.

    python validate.py --load DIR --data prompts.jsonl --max-draft-len 1,2,3,4,8 --output report.json --html report.html
    python validate.py --base EXPORT/base --speculative-model EXPORT/draft --data prompts.jsonl --output report.json
    python validate.py --base BASE --decoding-type NGram --data prompts.jsonl --output report.json

Prompts are chat JSON lines or question files with `turns`. A later run with the same --output resumes.
Exit code 1: an answer differs where neither a tie of the two best logits nor rounding explains it.
"""

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ValidateRun


def parser() -> cli.Parser:
    return cli.Parser(__doc__, ValidateRun)


def main(args: argparse.Namespace) -> int:
    from megatron_spec.commands.decode import validate

    report = validate(args.run)
    rounds = report.about["fake_quantised_base"] and not args.run.fp64  # a flipped fp8 code is a large difference
    return int(not rounds and any(run.unexplained for run in report.runs))


if __name__ == "__main__":
    cli.run(parser(), main)
