"""Write the start-up files of a serving engine for an exported draft, or for another speculation method.

    python tools/make_serving_config.py EXPORT_DIR --engine trtllm --base TARGET --output trtllm.yaml
    python tools/make_serving_config.py EXPORT_DIR --engine vllm --base TARGET [--docker]
    python tools/make_serving_config.py EXPORT_DIR --engine sglang --base TARGET
    python tools/make_serving_config.py EXPORT_DIR --engine triton --base TARGET --output model_repository
    python tools/make_serving_config.py --method ngram --engine vllm --base TARGET
    python tools/make_serving_config.py --method pard --draft-model SMALL --engine trtllm --base TARGET

trtllm: a YAML file that starts with the commands to use it; vllm and sglang: a command line; triton: a model repository
for its vLLM backend. Without --output the text goes to standard output. EXPORT_DIR is the draft's folder, or the output
folder of export.py with draft/ and base/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.checkpoint.spec import is_draft_checkpoint
from megatron_spec.config import UserError
from megatron_spec.export import bases
from megatron_spec.families import refuse_draft
from megatron_spec.runtime.files import model_json, read_object, require_own, write_text
from megatron_spec.serving import sglang, trtllm, vllm
from megatron_spec.serving.docker import docker_command
from megatron_spec.serving.draft import Speculation, exported

log = logging.getLogger("megatron_spec.make_serving_config")

ONLY = {
    "max_matching_ngram_size": "--method ngram --engine trtllm, or --method ngram --engine vllm, "
    "or --method ngram --engine triton, or --method sa",
    "is_public_pool": "--method ngram --engine trtllm",
    "is_keep_all": "--method ngram --engine trtllm",
    "is_use_oldest": "--method ngram --engine trtllm",
    "enable_global_pool": "--method sa",
    "global_pool_size": "--method sa",
    "sa_threshold": "--engine trtllm",
    "num_nextn_predict_layers": "--method mtp",
    "relaxed_topk": "--method mtp --engine trtllm",
    "relaxed_delta": "--method mtp --engine trtllm",
    "max_batch_size": "--engine trtllm",
    "max_num_tokens": "--engine trtllm",
    "max_seq_len": "--engine trtllm",
    "free_gpu_memory_fraction": "--engine trtllm",
    "enable_autotuner": "--engine trtllm",
    "older": "--engine trtllm",
    "name": "--engine triton",
    "load_all": "--engine triton",
    "draft_model": "--method draft_target, or --method pard, or --engine triton",
}
"""Flags with a single use; refused elsewhere."""
METHODS = ["exported", "ngram", "sa", "draft_target", "pard", "mtp"]
PORT = 8000
TWINS = argparse.BooleanOptionalAction


def port(text: str) -> int:
    """An argparse type: a port that has two after it, as Triton's are three."""
    value = int(text)
    if not 1 <= value <= 65533:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65533, found {value}")
    return value


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("export_dir", metavar="EXPORT_DIR", nargs="?", help="exported draft")
    p.add_argument(
        "--engine", required=True, choices=["trtllm", "vllm", "sglang", "triton"], help="triton: with its vLLM backend"
    )
    p.add_argument(
        "--method", choices=METHODS, default="exported", help="speculation method (default: the exported draft)"
    )
    p.add_argument("--base", metavar="TARGET", help="the target's folder or hub name (default: EXPORT_DIR/base)")
    p.add_argument(
        "--draft-model",
        metavar="DIR",
        help="draft_target and pard: the smaller model; triton: a third model, with it as draft",
    )
    p.add_argument(
        "--max-draft-len", type=int, metavar="N",
        help="draft tokens per step (default: 3; block drafts: the whole block; speculators: as config.json says)",
    )  # fmt: skip
    p.add_argument("--tp-size", type=cli.at_least_one, default=1, help="tensor parallel size (default: 1)")
    p.add_argument("--docker", action="store_true", help="wrap the server command in docker")
    p.add_argument("--image", help="docker image (default: the engine's own)")
    p.add_argument(
        "--port",
        type=port,
        help="HTTP port; triton: gRPC and metrics use the next two (default: 8000)",
    )
    p.add_argument("--output", metavar="PATH", help="file, or folder for triton (default: standard output)")
    add_method_flags(p)
    add_engine_flags(p)
    return p


def add_method_flags(p: cli.Parser) -> None:
    """Flags of one speculation method each."""
    group = p.add_argument_group("speculation methods", "with TensorRT-LLM's names")
    add = group.add_argument
    add(
        "--max-matching-ngram-size",
        type=int,
        help="ngram: longest suffix to look up (default: 2); sa: its length (default: -1)",
    )
    add("--is-public-pool", action=TWINS, help="ngram: share the pool between requests (default: on)")
    add("--is-keep-all", action=TWINS, help="ngram: keep every continuation of a pattern (default: on)")
    add("--is-use-oldest", action=TWINS, help="ngram: propose the oldest continuation (default: on)")
    add("--enable-global-pool", action="store_true", default=None, help="sa: match other requests, too")
    add("--global-pool-size", type=int, help="sa: number of requests kept in the pool")
    add(
        "--sa-threshold",
        type=int,
        help="EAGLE-3, mtp, pard: use a lookup's proposal if its match is at least this long",
    )
    add("--num-nextn-predict-layers", type=int, help="mtp: another name of --max-draft-len")
    add("--relaxed-topk", type=int, help="mtp: relaxed acceptance in thinking phases, among the top K tokens")
    add("--relaxed-delta", type=float, help="mtp: ... within this log-probability of the top token")


def add_engine_flags(p: cli.Parser) -> None:
    """Flags of one engine each."""
    add = p.add_argument_group("engines").add_argument
    add("--max-batch-size", type=int, help="trtllm: maximum batch size, all sizes with CUDA graphs (default: 1)")
    add("--max-num-tokens", type=int, help="trtllm: maximum tokens per forward, including prompts")
    add("--max-seq-len", type=int, help="trtllm: maximum length of prompt and answer")
    add("--free-gpu-memory-fraction", type=float, help="trtllm: share of free memory for the KV cache")
    add("--enable-autotuner", action=TWINS, help="trtllm: autotune kernels at start (default: the engine's)")
    add("--older", action="store_true", default=None, help="trtllm: names of releases up to 1.2")
    add("--name", help="triton: name of the model with the draft (default: eagle_model)")
    add(
        "--load-all", action="store_true", default=None,
        help="triton: also load the models to compare with; they share memory (default: only the one with the draft)",
    )  # fmt: skip


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags without effect."""
    for name, where in ONLY.items():
        if getattr(args, name) is None:
            continue
        used = any(
            all(getattr(args, flag[2:]) == value for flag, value in zip(w.split()[::2], w.split()[1::2], strict=True))
            for w in where.split(", or ")
        )
        if not used:
            raise UserError(f"--{name.replace('_', '-')} needs {where}: leave it out")
    if (args.relaxed_topk is None) != (args.relaxed_delta is None):
        raise UserError("--relaxed-topk and --relaxed-delta need each other: give both")
    if args.num_nextn_predict_layers and args.max_draft_len not in (None, args.num_nextn_predict_layers):
        raise UserError(
            f"--num-nextn-predict-layers {args.num_nextn_predict_layers}, but --max-draft-len {args.max_draft_len}: "
            "each module drafts one token, give one of them"
        )
    if args.image and not args.docker:
        raise UserError("--image needs --docker: add it, or leave --image out")
    if args.method == "exported" and not args.export_dir:
        raise UserError("give EXPORT_DIR, or another --method")
    if args.method != "exported" and args.export_dir:
        raise UserError(f"--method {args.method} needs no exported draft: leave {args.export_dir} out")


def check_models(args: argparse.Namespace) -> None:
    """Raise UserError for a folder on this machine that no engine loads as target or second model."""
    for name in filter(None, (args.base, args.draft_model)):
        folder = Path(name)
        if is_draft_checkpoint(folder):
            raise UserError(f"{name} is a draft checkpoint, expected a whole model: give the base it was made for")
        if folder.is_dir():
            refuse_draft(model_json(folder).get("architectures"), name)


def local(name: str, docker: bool) -> str:
    """The absolute path of a folder; a hub name unchanged. Raises UserError for a missing folder that is mounted."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if name.startswith(("/", ".", "~")):
        if docker:
            raise UserError(f"{name}: no such folder, so --docker cannot mount it")
        log.warning("there is no folder %s on this machine: run the command on one that has it", name)
    return name


def plan_of(args: argparse.Namespace) -> Speculation:
    """The speculation method and its options. Raises UserError."""
    names = {f.name for f in dataclasses.fields(Speculation)} - {"method", "max_draft_len", "model"}
    options = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if args.method == "exported":
        return exported(args.export_dir, args.max_draft_len, base=target_folder(args), **options)
    model = (
        local(args.draft_model, args.docker) if args.draft_model and args.method in ("draft_target", "pard") else None
    )
    if args.relaxed_topk is not None:
        options["relaxed"] = (args.relaxed_topk, args.relaxed_delta)
    length = args.max_draft_len if args.max_draft_len is not None else args.num_nextn_predict_layers
    return Speculation(args.method, 3 if length is None else length, model, **options)


def target_folder(args: argparse.Namespace) -> Path | None:
    """The target's folder, if it is on this machine."""
    folder = Path(args.base) if args.base else Path(args.export_dir) / "base"
    return folder.resolve() if (folder / "config.json").is_file() else None


def target(args: argparse.Namespace) -> str:
    """The target's path. Raises UserError if it is neither given nor exported."""
    if args.base:
        return local(args.base, args.docker)
    if args.export_dir:
        if found := target_folder(args):
            return str(found)
        missing = Path(args.export_dir) / "base"
        raise UserError(f"--engine {args.engine} needs the target: give --base (there is no {missing})")
    raise UserError(f"--engine {args.engine} needs the target: give --base")


def check_target(args: argparse.Namespace) -> None:
    """Raise UserError for a base with which a method does not work; warn if the draft was trained for another base."""
    if not args.base or not (Path(args.base) / "config.json").is_file():
        return  # a hub name: the engine downloads it
    config = read_object(Path(args.base) / "config.json")
    if args.method == "mtp" and not any("nextn" in key or "mtp" in key for key in flat_keys(config)):
        raise UserError(f"--method mtp: {args.base} has no prediction module (by config.json)")
    if args.method in ("sa", "draft_target", "pard") and args.engine == "trtllm":
        why = bases.lost((config.get("architectures") or [None])[0], "other").get("trtllm")
        if why:
            raise UserError(f"--method {args.method}: TensorRT-LLM does not draft so for {args.base}: {why}")
    if args.method != "exported":
        return
    own = Path(args.export_dir) / "base" / "config.json"
    if own.is_file() and "quantization_config" in read_object(own) and "quantization_config" not in config:
        log.warning("the draft was trained for the quantised base in %s; %s is not quantised", own.parent, args.base)


def flat_keys(config: dict[str, Any]) -> list[str]:
    """Keys at the top level and, for multimodal models, in the text model's configuration."""
    return [*config, *(config.get("text_config") or {})]


def triton(args: argparse.Namespace, plan: Speculation) -> str:
    """Write the repository; return the command that serves it."""
    if not args.output:
        raise UserError("--engine triton writes a folder: give --output")
    other, name, base = None, args.name or "eagle_model", target(args)
    if args.draft_model and args.method not in ("draft_target", "pard"):
        other = Speculation("draft_target", plan.max_draft_len, local(args.draft_model, args.docker))
    share = vllm.MEMORY / (2 + (other is not None)) if args.load_all else vllm.MEMORY
    models = vllm.triton_models(plan, base, name, other, args.tp_size, round(share, 2))
    vllm.write_triton_repository(args.output, models)
    loaded = list(models) if args.load_all else [name]
    number = args.port or PORT
    command = vllm.triton_command(str(Path(args.output).resolve()), loaded, number)
    if args.docker:
        ports, inside = range(number, number + 3), [json.dumps(model) for model in models.values()]
        hub = from_hub(base, plan.model, other and other.model)
        command = docker_command(args.image or vllm.TRITON_IMAGE, command, ports, inside, hub=hub)
    return shlex.join(command) + "\n"


def from_hub(*models: str | None) -> bool:
    """True if one of the models is a hub name instead of a folder."""
    return any(model is not None and not Path(model).exists() for model in models)


def trtllm_file(args: argparse.Namespace, plan: Speculation) -> str:
    """The YAML file, preceded by the commands to use it."""
    path = trtllm.options_path(args.output)
    known = args.base or (args.export_dir and (Path(args.export_dir) / "base").is_dir())
    base = target(args) if known else None
    if base is None and args.port is not None:
        raise UserError("--port is for the command that serves one target: give --base, or leave it out")
    names = {f.name for f in dataclasses.fields(trtllm.EngineOptions)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    options = trtllm.EngineOptions(**given)
    number = args.port or PORT
    content = trtllm.trtllm_yaml(plan, base, path, options, number)
    if not args.docker:
        return content
    if base is None or not args.output:
        raise UserError("--docker mounts the YAML file of a server for one target: give --base and --output")
    inside = trtllm.serve_command(base, path, number, args.tp_size, host="0.0.0.0")
    image = args.image or (trtllm.OLDER_IMAGE if options.older else trtllm.IMAGE)
    command = docker_command(
        image, inside, [number], [plan.model or ""], written=[path], hub=from_hub(base, plan.model)
    )
    return f"# {shlex.join(command)}\n" + content


def command_line(args: argparse.Namespace, plan: Speculation) -> str:
    """The command that starts vLLM or SGLang."""
    base, number = target(args), args.port or PORT
    if args.engine == "vllm":
        command = vllm.vllm_command(plan, base, number, args.tp_size)
        image = vllm.MEDUSA_IMAGE if plan.method == "medusa" else vllm.IMAGE
        command = ["--model", *command[2:]] if args.docker else command  # the image starts `vllm serve` itself
    else:
        host, image = "0.0.0.0" if args.docker else None, sglang.IMAGE
        command = sglang.sglang_command(plan, base, number, args.tp_size, host)
    if args.docker:
        command = docker_command(args.image or image, command, [number], hub=from_hub(base, plan.model))
    return shlex.join(command) + "\n"


def text(args: argparse.Namespace, plan: Speculation) -> str:
    """The YAML file or command line."""
    return trtllm_file(args, plan) if args.engine == "trtllm" else command_line(args, plan)


def is_served(path: Path) -> bool:
    """True for a file of `text`."""
    with path.open("rb") as file:
        begin = file.read(64).decode(errors="replace")
    return begin.removeprefix("# ").startswith(
        ("trtllm-serve ", "docker run ", "speculative_config:", "vllm serve ", "python3 -m sglang.launch_server ")
    )


def main(args: argparse.Namespace) -> None:
    """Write or print. Raises UserError for invalid input."""
    check_flags(args)
    check_models(args)
    if args.output and args.engine != "triton":
        require_own(args.output, is_served, "a result of make_serving_config.py")
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
