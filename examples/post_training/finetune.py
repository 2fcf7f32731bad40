"""Train the draft of a checkpoint on conversations; on a quantised checkpoint this is quantisation-aware training.

    python finetune.py --load DIR --save DIR2 --data train.jsonl --train-iters 1000 --lr 1e-4
    torchrun --nproc-per-node 8 finetune.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

Started again with the same --save it continues where it was. metrics.jsonl is written beside the checkpoints; draw it
with tools/plot_run.py.
"""

import argparse
import sys

from megatron_spec import cli
from megatron_spec.config import ObjectiveConfig, ParallelConfig, TrainConfig, UserError


def parser() -> cli.Parser:
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint to start from")
    p.add_argument("--save", required=True, metavar="DIR", help="folder of this run: checkpoints and metrics.jsonl")
    p.add_argument("--data", metavar="JSONL", help="conversations, one JSON object a line")
    p.add_argument(
        "--offline-data", metavar="DIR", help="instead: features of offline_feature_extract.py; no base runs"
    )
    p.add_argument("--seq-length", type=int, help="tokens a conversation is cut to (default: 2048)")
    p.add_argument("--data-cache-path", metavar="DIR", help="folder for tokenised data (default: beside the data)")
    p.add_argument("--base", metavar="DIR", help="the base's place, when it moved since convert_model.py")
    p.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the base's)")
    p.add_template_flag()
    p.add_argument("--feature-cache", metavar="DIR", help="compute the base's features once, into this folder")
    p.add_argument("--base-fp8", action="store_true", help="run the base in real fp8 (Hopper or newer, with --bf16)")
    p.add_argument("--draft-fp8", action="store_true", help="run the draft layer's linears in real fp8 as well")
    p.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local", help="base layers")
    p.add_argument(
        "--teacher",
        choices=["quantised", "original"],
        default="quantised",
        help="of a checkpoint with a quantised base: train on that base as it is served, or on the original one "
        "(default: quantised)",
    )
    p.add_argument("--tensorboard-dir", metavar="DIR", help="write TensorBoard events")
    p.add_argument("--wandb-project", metavar="NAME", help="log to Weights & Biases")
    p.add_argument("--eval-data", metavar="JSONL", help="held-out prompts for --eval-acceptance-interval")
    p.add_argument(
        "--eval-acceptance-interval", type=cli.at_least_one, metavar="N", default=0,
        help="every N steps (and at the end) decode them with the draft; SAVE/best keeps the one accepted most",
    )  # fmt: skip
    p.add_argument("--eval-prompts", type=cli.at_least_one, metavar="N", default=32, help="of them (default: 32)")
    p.add_argument("--eval-draft-len", type=cli.at_least_one, metavar="N", default=3, help="draft tokens (default: 3)")
    p.add_argument("--eval-tokens", type=cli.at_least_one, metavar="N", default=64, help="of an answer (default: 64)")
    p.add_argument(
        "--train-epochs", type=cli.at_least_one, metavar="N", help="instead of --train-iters: passes over the data"
    )
    p.add_dry_run()
    p.add_config(TrainConfig, train_iters=0)
    p.add_config(ObjectiveConfig)
    p.add_config(ParallelConfig)
    return p


def dry_run(args: argparse.Namespace) -> None:
    from megatron_spec.commands.plan import Cluster, plan

    machines = {k: getattr(args, k) for k in ("num_nodes", "gpus_per_node", "gpu_memory_gib")}
    configs = (
        cli.config_from(TrainConfig, args, train_iters=args.train_iters or 1),
        cli.config_from(ObjectiveConfig, args),
        cli.config_from(ParallelConfig, args),
    )
    cluster = Cluster(**{k: v for k, v in machines.items() if v is not None})
    print(plan(args.load, *configs, cluster, args.seq_length or 2048, offline=args.offline_data is not None))


def main(args: argparse.Namespace) -> None:
    if args.dry_run:
        return dry_run(args)
    from megatron_spec.commands.evaluate import EvalRequest
    from megatron_spec.commands.finetune import FinetuneRun, finetune

    if bool(args.train_epochs) == bool(args.train_iters):
        raise UserError(
            f"found {'both' if args.train_iters else 'neither'} of --train-iters and --train-epochs, expected one"
        )
    configs = {  # the steps of epochs are counted when the data are known
        "train": cli.config_from(TrainConfig, args, train_iters=args.train_iters or 1),
        "objective": cli.config_from(ObjectiveConfig, args),
        "parallel": cli.config_from(ParallelConfig, args),
    }
    plain = (
        "load",
        "save",
        "data",
        "offline_data",
        "seq_length",
        "base",
        "tokenizer",
        "feature_cache",
        "base_fp8",
        "teacher",
    )
    plain += (
        "chat_template_kwargs",
        "data_cache_path",
        "draft_fp8",
        "transformer_impl",
        "tensorboard_dir",
        "wandb_project",
        "train_epochs",
    )
    configs["evaluation"] = EvalRequest(
        args.eval_data, args.eval_acceptance_interval, args.eval_prompts, args.eval_draft_len, args.eval_tokens
    )
    run = FinetuneRun(**configs, **{k: getattr(args, k) for k in plain})
    if not finetune(run):
        sys.exit(3)  # stopped by a signal after saving: a scheduler starts it again


if __name__ == "__main__":
    cli.run(parser(), main)
