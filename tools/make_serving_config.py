"""Write what a serving engine needs to start with an exported draft.

    python tools/make_serving_config.py EXPORT_DIR --engine trtllm --output trtllm.yaml
    python tools/make_serving_config.py EXPORT_DIR --engine vllm --base TARGET
    python tools/make_serving_config.py EXPORT_DIR --engine sglang --base TARGET
    python tools/make_serving_config.py EXPORT_DIR --engine triton --base TARGET --output model_repository

trtllm: a YAML file; vllm and sglang: a command line; triton: a model repository for its vLLM backend. Without --output
the text goes to standard output. EXPORT_DIR is the draft's folder, or the one of export.py that holds draft/ and base/.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.files import write_text
from megatron_spec.serving.sglang import sglang_command
from megatron_spec.serving.trtllm import trtllm_yaml
from megatron_spec.serving.vllm import vllm_command, write_triton_repository


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("export_dir", metavar="EXPORT_DIR", help="exported draft")
    p.add_argument("--engine", required=True, choices=["trtllm", "vllm", "sglang", "triton"])
    p.add_argument("--base", metavar="TARGET", help="the target's folder or hub name (default: EXPORT_DIR/base)")
    p.add_argument("--max-draft-len", type=int, default=3, help="tokens drafted per step (default: 3)")
    p.add_argument("--max-batch-size", type=int, default=1, help="trtllm: largest batch with a CUDA graph (default: 1)")
    p.add_argument("--older", action="store_true", help="trtllm: for releases that know speculative_model_dir only")
    p.add_argument("--name", default="draft", help="triton: name of the model (default: draft)")
    p.add_argument("--output", metavar="PATH", help="file, or folder for triton (default: standard output)")
    return p


def target(args: argparse.Namespace) -> str:
    """The target's path. Raises UserError when it is neither given nor exported."""
    if args.base:
        return str(Path(args.base).resolve()) if Path(args.base).is_dir() else str(args.base)
    exported = Path(args.export_dir) / "base"
    if (exported / "config.json").is_file():
        return str(exported.resolve())
    raise UserError(f"--engine {args.engine} needs the target: give --base (there is no {exported})")


def main(args: argparse.Namespace) -> None:
    """Write or print. Raises UserError for input that does not fit."""
    if args.engine == "triton":
        if not args.output:
            raise UserError("--engine triton writes a folder: give --output")
        write_triton_repository(args.output, args.name, args.export_dir, target(args), args.max_draft_len)
        return
    if args.engine == "trtllm":
        text = trtllm_yaml(args.export_dir, args.max_draft_len, max_batch_size=args.max_batch_size, older=args.older)
    else:
        command = {"vllm": vllm_command, "sglang": sglang_command}[args.engine]
        text = shlex.join(command(args.export_dir, target(args), args.max_draft_len)) + "\n"
    if args.output:
        write_text(args.output, text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    cli.run(make_parser(), main)
