"""Check that an exported folder, ours or anybody's, loads in serving engines as it was meant.

    python tools/check_export.py DIR [--engine trtllm|vllm|sglang] [--base TARGET_DIR]

Knows EAGLE-3, EAGLE-1, Medusa, MTP, the format of speculators, TensorRT-LLM's legacy checkpoint, and whole models.
Prints every broken rule and how to fix it. Exit code 0: none; 1: at least one (warnings alone do not count);
2: the folder cannot be read, or wrong usage.
"""

from __future__ import annotations

import argparse
import sys

from megatron_spec import cli
from megatron_spec.export.check import check_folder


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("folder", metavar="DIR", help="draft or model as engines read it")
    p.add_argument("--engine", choices=["trtllm", "vllm", "sglang"], help="rules of this engine only (default: all)")
    p.add_argument("--base", metavar="TARGET_DIR", help="the target's folder, for the rules that depend on it")
    return p


def main(args: argparse.Namespace) -> None:
    """Check and print; exits with 1 when a rule is broken."""
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
