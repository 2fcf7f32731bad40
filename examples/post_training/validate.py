"""Measure the acceptance length of a draft: the base decodes alone and with the draft, and the texts must be identical.

    python validate.py --load DIR --data prompts.jsonl --max-draft-len 1,2,3,4,8 --output report.json --html report.html
    python validate.py --base EXPORT/base --speculative-model EXPORT/draft --data prompts.jsonl --output report.json
    python validate.py --base BASE --decoding-type NGram --data prompts.jsonl --output report.json

Prompts are chat JSON lines or question files with `turns`. A second start with the same --output continues.
Exit code 1: an answer differs where neither a tie of the two best logits nor rounding explains it.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", metavar="DIR", help="draft checkpoint (plain or quantised)")
    p.add_argument("--data", required=True, metavar="JSONL", help="prompts")
    p.add_argument("--output", metavar="JSON", help="where the report goes (default: DIR/validate.json)")
    p.add_argument("--html", metavar="HTML", help="the report as a page with plots as well")
    p.add_argument(
        "--max-draft-len", "--num-nextn-predict-layers", type=cli.whole_numbers, default=(3,), metavar="N[,N...]",
        action=cli.Once,
        help="draft tokens of a chain or depth of a tree; several are measured in one run (default: 3)",
    )  # fmt: skip
    p.add_argument("--num-prompts", type=cli.at_least_one, metavar="N", help="use the first N prompts (default: all)")
    p.add_model_flags(base="base model for drafts that bring none; with --load where the base is, when it moved")
    p.add_argument(
        "--fp64", action="store_true", help="float64: a fake-quantised base gives the same text in every row shape"
    )
    p.add_config(DecodeConfig, skip=["max_draft_len"])
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> int:
    from megatron_spec.commands.decode import validate

    report = validate(
        args.data,
        load=args.load,
        output=args.output,
        html_output=args.html,
        draft_lens=args.max_draft_len,
        num_prompts=args.num_prompts,
        base=args.base,
        tokenizer=args.tokenizer,
        bf16=args.bf16,
        fp64=args.fp64,
        decode=cli.config_from(DecodeConfig, args, max_draft_len=args.max_draft_len[0]),
        parallel=cli.config_from(ParallelConfig, args),
    )
    rounds = report.about["fake_quantised_base"] and not args.fp64  # a flipped code of fp8 is no small difference
    return int(not rounds and any(run.unexplained for run in report.runs))


if __name__ == "__main__":
    cli.run(parser(), main)
