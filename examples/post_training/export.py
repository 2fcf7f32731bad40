"""Write a draft (and its base, when that is fake-quantised) in the formats that serving engines load, and check it.

    python export.py --export-dir OUT --export-extra-modules --load DIR

OUT/draft holds the draft (bf16, or fp8 when the checkpoint is quantised), OUT/base the fp8 base, and OUT/trtllm.yaml a
TensorRT-LLM configuration (EAGLE-3). --export-format speculators writes OUT/draft in the format of that library;
trtllm-legacy writes OUT/trtllm, base and Medusa heads together with one file per rank. What was written is read back
and compared with the model in memory before it appears.
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
    p.add_argument(
        "--export-format",
        default="hf",
        choices=["hf", "trtllm-legacy", "speculators"],
        help="of the draft (default: hf, which vLLM, SGLang and TensorRT-LLM load)",
    )
    p.add_argument("--trtllm-tp", type=cli.at_least_one, default=1, help="trtllm-legacy: ranks (default: 1)")
    p.add_argument("--export-medusa-pt", action="store_true", help="Medusa: write medusa_lm_head.pt too")
    p.add_argument("--export-embeddings", action="store_true", help="write the base's embedding into the draft too")
    p.add_argument(
        "--max-draft-len",
        type=cli.at_least_one,
        default=3,
        help="draft length in the serving configuration (default: 3)",
    )
    p.add_model_flags(tokenizer=False)
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.export import ExportRun, export

    export(
        ExportRun(
            load=args.load,
            export_dir=args.export_dir,
            extra_modules=args.export_extra_modules,
            with_base=args.export_base,
            base=args.base,
            max_draft_len=args.max_draft_len,
            format=args.export_format,
            trtllm_tp=args.trtllm_tp,
            medusa_pt=args.export_medusa_pt,
            export_embeddings=args.export_embeddings,
            bf16=args.bf16,
            parallel=cli.config_from(ParallelConfig, args),
        )
    )


if __name__ == "__main__":
    cli.run(parser(), main)
