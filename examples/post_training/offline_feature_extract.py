"""Run the base once over the conversations and store what a draft is trained from.

    python offline_feature_extract.py --load DIR --data train.jsonl --output-dir FEATURES
    python finetune.py --load DIR --save DIR2 --offline-data FEATURES ...          # needs no base layers in memory

Several runs may share the work and the folder: run i of n is given --part i/n (a SLURM job array). A killed run goes on
with the shards that are missing. Features of another base, template or length are refused.
"""

import argparse

from megatron_spec import cli
from megatron_spec.config import ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint: says which base and captures")
    p.add_argument("--data", required=True, metavar="JSONL", help="conversations")
    p.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the features")
    p.add_argument("--seq-length", type=int, default=2048, help="tokens a conversation is cut to (default: 2048)")
    p.add_argument(
        "--micro-batch-size", type=cli.at_least_one, default=4, help="conversations per forward (default: 4)"
    )
    p.add_argument(
        "--features-dtype", choices=["float32", "bfloat16", "float8_e4m3fn"],
        help="on disk (default: that of the base); fp8 halves bfloat16, with a scale per row and layer",
    )  # fmt: skip
    p.add_argument(
        "--part", type=part, default=(0, 1), metavar="I/N", help="which share of the work, from 0 (default: 0/1)"
    )
    p.add_model_flags()
    p.add_config(ParallelConfig)
    return p


def part(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError
    return index, count


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.features import extract_features

    names = ("seq_length", "micro_batch_size", "base", "tokenizer", "bf16", "features_dtype", "part")
    options = {name: getattr(args, name) for name in names}
    parallel = cli.config_from(ParallelConfig, args)
    options["template_kwargs"] = args.chat_template_kwargs
    extract_features(args.load, args.output_dir, args.data, parallel=parallel, **options)


if __name__ == "__main__":
    cli.run(parser(), main)
