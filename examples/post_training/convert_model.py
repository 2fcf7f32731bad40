"""Give a base model a draft model: a fresh one, or a published one to train on.

    python convert_model.py --export-algorithm eagle --export-eagle-algorithm eagle3 --load BASE --save DIR
    python convert_model.py --export-algorithm dflash --load BASE --save DIR
    python convert_model.py --export-algorithm medusa --export-num-medusa-heads 4 --load BASE --save DIR
    python convert_model.py --draft FOLDER --load BASE --save DIR
    torchrun --nproc-per-node 4 convert_model.py --tensor-model-parallel-size 4 --load BASE --save DIR ...

BASE is a Hugging Face folder or a Megatron dist_checkpointing checkpoint. A reduced draft vocabulary comes from
tools/calibrate_draft_vocab.py. The base is referred to by path and content hash, not copied.
"""

import argparse
import typing

from megatron_spec import cli
from megatron_spec.config import EagleAlgorithm, ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument(
        "--load", required=True, metavar="BASE", help="Hugging Face folder, name on the hub, or Megatron checkpoint"
    )
    p.add_argument("--save", required=True, metavar="DIR", help="new or empty folder for the draft checkpoint")
    p.add_argument(
        "--export-algorithm",
        action=cli.Once,
        choices=["eagle", "medusa", "dflash", "dspark"],
        default="eagle",
        help="kind of draft",
    )
    p.add_argument(
        "--export-eagle-algorithm", action=cli.Once, choices=typing.get_args(EagleAlgorithm),
        help="EAGLE variant; eagle-mtp is multi-token prediction (default: eagle3)",
    )  # fmt: skip
    p.add_argument("--export-num-medusa-heads", type=int, metavar="N", help="Medusa heads (default: 4)")
    p.add_argument("--export-num-medusa-layers", type=int, metavar="N", help="blocks per Medusa head (default: 1)")
    p.add_argument(
        "--medusa-share-base-head", action="store_const", const=True,
        help="the base's frozen LM head after the Medusa blocks, instead of a trained one each",
    )  # fmt: skip
    p.add_argument("--eagle-config", metavar="JSON", help="overrides of the draft's architecture")
    p.add_argument("--draft-config", metavar="JSON", help="dflash, dspark: overrides of the draft's architecture")
    p.add_argument(
        "--mtp-from-base", action="store_const", const=True,
        help="eagle-mtp: the prediction module that the base ships (DeepSeek-V3), instead of a fresh one",
    )  # fmt: skip
    p.add_argument(
        "--draft", metavar="FOLDER",
        help="train on from the draft in FOLDER, of any format that check_export.py knows, with its own vocabulary",
    )  # fmt: skip
    p.add_argument("--draft-vocab", metavar="DIR", help="calibrated draft vocabulary (default: the whole vocabulary)")
    p.add_argument("--bf16", action="store_true", help="bfloat16 weights (default: float32)")
    p.add_argument("--seed", type=int, default=1234, help="seed of the draft's initial values (default: 1234)")
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.convert import convert

    names = ("eagle_config", "draft_config", "draft_vocab", "draft", "bf16", "seed")
    convert(
        args.load,
        args.save,
        algorithm=args.export_algorithm,
        eagle_algorithm=args.export_eagle_algorithm,
        num_medusa_heads=args.export_num_medusa_heads,
        num_medusa_layers=args.export_num_medusa_layers,
        share_base_head=args.medusa_share_base_head,
        mtp_from_base=args.mtp_from_base,
        parallel=cli.config_from(ParallelConfig, args),
        **{name: getattr(args, name) for name in names},
    )


if __name__ == "__main__":
    cli.run(parser(), main)
