"""Write what a serving engine needs to start with an exported draft, or with another way of drafting.

    python tools/make_serving_config.py EXPORT_DIR --engine trtllm --base TARGET --output trtllm.yaml
    python tools/make_serving_config.py EXPORT_DIR --engine vllm --base TARGET [--docker]
    python tools/make_serving_config.py EXPORT_DIR --engine sglang --base TARGET
    python tools/make_serving_config.py EXPORT_DIR --engine triton --base TARGET --output model_repository
    python tools/make_serving_config.py --method ngram --engine vllm --base TARGET

trtllm: a YAML file that begins with the commands that read it; vllm and sglang: a command line; triton: a model
repository for its vLLM backend. Without --output the text goes to standard output. EXPORT_DIR is the draft's folder, or
the one of export.py that holds draft/ and base/.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import read_json, write_text
from megatron_spec.serving import sglang, trtllm, vllm
from megatron_spec.serving.docker import docker_command
from megatron_spec.serving.draft import Speculation, exported

log = logging.getLogger("megatron_spec.make_serving_config")

ONLY = {
    "max_matching_ngram_size": "--method ngram",
    "num_nextn_predict_layers": "--method mtp",
    "relaxed_topk": "--method mtp --engine trtllm",
    "relaxed_delta": "--method mtp --engine trtllm",
    "max_batch_size": "--engine trtllm",
    "older": "--engine trtllm",
    "name": "--engine triton",
    "draft_model": "--method draft_target, or --engine triton",
}
"""Flags that mean something in one place only: given elsewhere they are refused."""


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("export_dir", metavar="EXPORT_DIR", nargs="?", help="exported draft")
    p.add_argument("--engine", required=True, choices=["trtllm", "vllm", "sglang", "triton"])
    p.add_argument(
        "--method", choices=["exported", "ngram", "draft_target", "mtp"], default="exported",
        help="way of drafting (default: the exported draft)",
    )  # fmt: skip
    p.add_argument("--base", metavar="TARGET", help="the target's folder or hub name (default: EXPORT_DIR/base)")
    p.add_argument(
        "--draft-model", metavar="DIR", help="draft_target: the smaller model; triton: a third model with it"
    )
    p.add_argument("--max-draft-len", type=int, default=3, help="tokens drafted per step (default: 3)")
    p.add_argument("--max-matching-ngram-size", type=int, help="ngram: longest suffix looked up (default: 2)")
    p.add_argument("--num-nextn-predict-layers", type=int, help="mtp: modules of the base (default: 1)")
    p.add_argument("--relaxed-topk", type=int, help="mtp: relaxed acceptance in thinking, among the best K")
    p.add_argument("--relaxed-delta", type=float, help="mtp: ... within this log-probability of the best")
    p.add_argument("--max-batch-size", type=int, help="trtllm: largest batch with a CUDA graph (default: 1)")
    p.add_argument(
        "--older", action="store_true", default=None, help="trtllm: releases with speculative_model_dir only"
    )
    p.add_argument("--name", help="triton: name of the model with the draft (default: eagle_model)")
    p.add_argument("--docker", action="store_true", help="a docker command line around the server's")
    p.add_argument("--image", help="docker image (default: the engine's own)")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--output", metavar="PATH", help="file, or folder for triton (default: standard output)")
    return p


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a flag that would do nothing here."""
    for name, where in ONLY.items():
        if getattr(args, name) is None:
            continue
        used = any(
            all(getattr(args, flag[2:]) == value for flag, value in zip(w.split()[::2], w.split()[1::2], strict=True))
            for w in where.split(", or ")
        )
        if not used:
            raise UserError(f"--{name.replace('_', '-')} is of {where}: leave it out")
    if (args.relaxed_topk is None) != (args.relaxed_delta is None):
        raise UserError("--relaxed-topk and --relaxed-delta come together")
    if args.image and not args.docker:
        raise UserError("--image is of --docker: leave it out")
    if args.method == "exported" and not args.export_dir:
        raise UserError("give EXPORT_DIR, or another --method")
    if args.method != "exported" and args.export_dir:
        raise UserError(f"--method {args.method} needs no exported draft: leave {args.export_dir} out")


def local(name: str) -> str:
    """A folder's absolute path; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def plan_of(args: argparse.Namespace) -> Speculation:
    """The way of drafting. Raises UserError."""
    if args.method == "exported":
        return exported(args.export_dir, args.max_draft_len)
    model = local(args.draft_model) if args.draft_model else None
    relaxed = (args.relaxed_topk, args.relaxed_delta) if args.relaxed_topk is not None else None
    return Speculation(
        args.method, args.max_draft_len, model if args.method == "draft_target" else None,
        max_matching_ngram_size=args.max_matching_ngram_size or 2, relaxed=relaxed,
        num_nextn_predict_layers=args.num_nextn_predict_layers or 1,
    )  # fmt: skip


def target(args: argparse.Namespace) -> str:
    """The target's path. Raises UserError when it is neither given nor exported."""
    if args.base:
        return local(args.base)
    if args.export_dir:
        found = Path(args.export_dir) / "base"
        if (found / "config.json").is_file():
            return str(found.resolve())
        raise UserError(f"--engine {args.engine} needs the target: give --base (there is no {found})")
    raise UserError(f"--engine {args.engine} needs the target: give --base")


def check_target(args: argparse.Namespace) -> None:
    """Raise UserError for MTP with a base that ships none; warn of a base that the draft was not trained for."""
    if not args.base or not (Path(args.base) / "config.json").is_file():
        return
    config = read_json(Path(args.base) / "config.json")
    if args.method == "mtp" and not any("nextn" in key or "mtp" in key for key in flat_keys(config)):
        raise UserError(f"--method mtp: {args.base} ships no prediction module (config.json names none)")
    if args.method != "exported":
        return
    own = Path(args.export_dir) / "base" / "config.json"
    if own.is_file() and "quantization_config" in read_json(own) and "quantization_config" not in config:
        log.warning("the draft was trained for the quantised base in %s; %s is not quantised", own.parent, args.base)


def flat_keys(config: dict[str, Any]) -> list[str]:
    """Names at the top level, and in the configuration of the text model where there are several."""
    return [*config, *(config.get("text_config") or {})]


def triton(args: argparse.Namespace, plan: Speculation) -> str:
    """Write the repository; the command that serves it."""
    if not args.output:
        raise UserError("--engine triton writes a folder: give --output")
    other = None
    if args.draft_model and args.method != "draft_target":
        other = Speculation("draft_target", args.max_draft_len, local(args.draft_model))
    models = vllm.triton_models(plan, target(args), args.name or "eagle_model", other)
    vllm.write_triton_repository(args.output, models)
    command = ["tritonserver", "--model-repository", str(Path(args.output).resolve()), "--http-port", str(args.port)]
    if args.docker:
        inside = [json.dumps(model) for model in models.values()]
        command = docker_command(args.image or vllm.TRITON_IMAGE, command, args.port, inside)
    return shlex.join(command) + "\n"


def text(args: argparse.Namespace, plan: Speculation) -> str:
    """The YAML file or command line."""
    if args.engine == "trtllm":
        place = trtllm.place_of(args.output)
        known = args.base or (args.export_dir and (Path(args.export_dir) / "base").is_dir())
        base = target(args) if known else None
        options = {"max_batch_size": args.max_batch_size or 1, "older": bool(args.older)}
        content = trtllm.trtllm_yaml(plan, base, place, **options)
        if args.docker and base is not None:
            inside = trtllm.serve_command(base, place, args.port)
            command = docker_command(args.image or trtllm.IMAGE, inside, args.port, [plan.model or ""])
            content = f"# {shlex.join(command)}\n" + content
        return content
    if args.engine == "vllm":
        command = vllm.vllm_command(plan, target(args), args.port)
        if args.docker:
            command = docker_command(args.image or vllm.IMAGE, ["--model", *command[2:]], args.port)
    else:
        command = sglang.sglang_command(plan, target(args), args.port)
        if args.docker:
            command = docker_command(args.image or sglang.IMAGE, command, args.port)
    return shlex.join(command) + "\n"


def main(args: argparse.Namespace) -> None:
    """Write or print. Raises UserError for input that does not fit."""
    check_flags(args)
    plan = plan_of(args)
    check_target(args)
    if args.engine == "triton":
        sys.stdout.write(triton(args, plan))
    elif args.output:
        write_text(args.output, text(args, plan))
    else:
        sys.stdout.write(text(args, plan))


if __name__ == "__main__":
    cli.run(make_parser(), main)
