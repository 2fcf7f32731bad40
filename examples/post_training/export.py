"""Write a draft (and its base, when that is fake-quantised) in the formats that serving engines load, and check it.

    python export.py --export-dir OUT --export-extra-modules --load DIR

OUT/draft holds the draft (bf16, or fp8 when the checkpoint is quantised), OUT/base the fp8 base, and OUT/trtllm.yaml a
TensorRT-LLM configuration. What was written is read back and compared with the model in memory before it appears.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint")
    p.add_argument("--export-dir", required=True, metavar="OUT", help="new or empty folder")
    p.add_argument(
        "--export-extra-modules",
        action="store_true",
        help="write the draft; without it only the base is written",
    )
    p.add_argument(
        "--export-base", action="store_true", help="write the base beside the draft also when it is not quantised"
    )
    p.add_model_flags(tokenizer=False)
    p.add_argument("--export-embeddings", action="store_true", help="write the base's embedding into the draft too")
    p.add_argument(
        "--max-draft-len",
        type=cli.at_least_one,
        default=3,
        help="draft length in the serving configuration (default: 3)",
    )
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.chain.export import export

    export(
        args.load,
        args.export_dir,
        extra_modules=args.export_extra_modules,
        with_base=args.export_base,
        base=args.base,
        max_draft_len=args.max_draft_len,
        bf16=args.bf16,
        export_embeddings=args.export_embeddings,
        parallel=cli.config_from(ParallelConfig, args),
    )


if __name__ == "__main__":
    cli.run(parser(), main)
