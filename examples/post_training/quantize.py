"""Fake-quantise base and draft of a checkpoint: attach fp8 quantisers and calibrate their ranges on conversations.

    python quantize.py --export-quant-cfg fp8 --load DIR --save DIR2 --data train.jsonl

Calibration runs every draft step, so that the draft's ranges hold for its own fed-back features. Follow with
finetune.py for quantisation-aware training, or with export.py.
"""

import argparse
import dataclasses

from megatron_spec import cli
from megatron_spec.config import ObjectiveConfig, ParallelConfig


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint to quantise")
    p.add_argument("--save", required=True, metavar="DIR", help="new or empty folder for the quantised checkpoint")
    p.add_argument("--data", required=True, metavar="JSONL", help="conversations to calibrate on")
    p.add_argument(
        "--export-quant-cfg",
        default="fp8",
        metavar="POLICY",
        help="fp8 (base and draft), fp8_draft_only, fp8_base_only, nvfp4_draft_only, none, or a JSON or YAML file with "
        "fields of QuantConfig: exclude, exclude_base, exclude_draft, calibration, ... (default: fp8)",
    )
    p.add_argument(
        "--export-kv-cache-quant", choices=["none", "fp8"], help="keys and values of the base (default: the policy's)"
    )
    p.add_argument("--calib-samples", type=cli.at_least_one, default=256, help="conversations used (default: 256)")
    p.add_argument("--seq-length", type=int, default=2048, help="tokens a conversation is cut to (default: 2048)")
    p.add_argument(
        "--micro-batch-size", type=cli.at_least_one, default=4, help="conversations per forward (default: 4)"
    )
    p.add_model_flags()
    names = {field.name for field in dataclasses.fields(ObjectiveConfig)}
    p.add_config(ObjectiveConfig, skip=sorted(names - {"ttt_steps", "alignment"}))  # the loss decides no range
    p.add_config(ParallelConfig)
    return p


def main(args: argparse.Namespace) -> None:
    from megatron_spec.commands.quantize import quantize

    names = ("seq_length", "micro_batch_size", "base", "tokenizer", "bf16")
    quantize(
        args.load,
        args.save,
        args.data,
        policy=args.export_quant_cfg,
        template_kwargs=args.chat_template_kwargs,
        kv_cache=args.export_kv_cache_quant,
        samples=args.calib_samples,
        objective=cli.config_from(ObjectiveConfig, args),
        parallel=cli.config_from(ParallelConfig, args),
        **{name: getattr(args, name) for name in names},
    )


if __name__ == "__main__":
    cli.run(parser(), main)
