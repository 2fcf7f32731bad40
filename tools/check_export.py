"""Check that an exported folder, from this package or elsewhere, loads correctly in serving engines.

    python tools/check_export.py DIR [--engine trtllm|vllm|sglang] [--base TARGET_DIR]
    python tools/check_export.py --fix DIR OUT --base TARGET_DIR

Supports EAGLE-3, EAGLE-1, Medusa, MTP, speculators' format, TensorRT-LLM's legacy checkpoint and complete models.
Prints every broken rule and how to fix it. Exit code 0: no errors (warnings do not count); 1: errors; 2: the folder
cannot be read, or wrong usage. --fix rewrites a draft of any of these formats to the new folder OUT, in the form that
engines load, and checks that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.export.check import check_folder


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("folder", metavar="DIR", help="exported draft or model")
    p.add_argument("out", metavar="OUT", nargs="?", help="with --fix: new output folder")
    p.add_argument("--fix", action="store_true", help="rewrite the draft in DIR to OUT in the form that engines load")
    p.add_argument(
        "--engine", choices=["trtllm", "vllm", "sglang"], help="check the rules of this engine only (default: all)"
    )
    p.add_argument("--base", metavar="TARGET_DIR", help="the target's folder, for rules that depend on it")
    return p


def _fix(folder: str, out: str, base: str | None) -> Path:
    if base is None:
        raise UserError("--fix needs --base, the target's folder: layers and vocabulary are checked against it")
    from megatron_spec.export.load import inspect_exported_base
    from megatron_spec.export.rewrite import rewrite

    return rewrite(folder, inspect_exported_base(base), out)


def main(args: argparse.Namespace) -> None:
    """Check and print; exits with 1 if a rule is broken."""
    if args.fix != (args.out is not None):
        raise UserError("--fix DIR OUT: " + ("give the new folder OUT" if args.fix else "OUT needs --fix"))
    if args.fix:
        args.folder = str(_fix(args.folder, args.out, args.base))
    findings = check_folder(args.folder, args.engine, args.base)
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    errors = sum(not f.warning for f in findings)
    if errors:
        sys.stdout.write(f"{args.folder}: {errors} rules broken\n")
        raise SystemExit(1)
    unchecked = "" if args.base else " (without --base, its context length and vocabulary were not compared)"
    sys.stdout.write(f"{args.folder}: ok{unchecked}\n")


if __name__ == "__main__":
    cli.run(make_parser(), main)
