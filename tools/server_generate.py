"""Generate training data with the target model on an OpenAI-compatible server.

    vllm serve MODEL &      # or trtllm-serve MODEL, or python -m sglang.launch_server --model-path MODEL --port 8000
    python tools/server_generate.py --url http://localhost:8000/v1 --data-path prompts.jsonl --output-path train.jsonl

Reads conversations (whose answers are replaced, turn by turn) and prompt files of prepare_conversations.py. Every
finished conversation is written at once; a later run with the same --output-path resumes. Conversations with a
truncated answer, or refused by the server, go to OUTPUT.rejected. The API key, if any, is read from OPENAI_API_KEY. In
a job array, --shard 3/16 selects a part and writes a file of its own (slurm/server_generate.sbatch).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.commands.runs import ChatText
from megatron_spec.config import UserError

SET_HERE = {"model", "messages", "tools", "n", "stream", "max_tokens", "temperature", "top_p", "top_k", "seed"}
"""Parameters of a request that flags or this tool set."""


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--data-path", required=True, metavar="JSONL", help="conversations or prompts")
    p.add_argument("--output-path", required=True, metavar="JSONL", help="conversations with answers")
    p.add_argument(
        "--url", nargs="+", default=["http://localhost:8000/v1"], help="endpoints (default: http://localhost:8000/v1)"
    )
    p.add_argument("--model", metavar="NAME", help="served model (default: the server's first)")
    p.add_argument(
        "--system-prompt", metavar="TEXT", help="system turn for conversations without one; also written to the output"
    )
    p.add_argument("--temperature", type=float, metavar="T", help="of the answers (default: the server's)")
    p.add_argument("--top-p", type=float, metavar="P", help="nucleus of sampling (default: the server's)")
    p.add_argument("--top-k", type=int, metavar="K", help="if the engine supports it")
    p.add_argument(
        "--max-tokens", type=cli.at_least_one, default=2048, help="maximum tokens per answer (default: %(default)s)"
    )
    p.add_argument("--seed", type=int, help="each answer's seed is derived from this one, conversation and turn")
    p.add_argument("--extra-body", metavar="JSON", help="additional request parameters, as a JSON object")
    p.add_fields(ChatText, "chat_template_kwargs")
    p.add_argument("--concurrency", type=cli.at_least_one, default=64, help="concurrent conversations (default: 64)")
    p.add_argument(
        "--retries", type=cli.at_least_zero, default=8, help="attempts after the first (default: %(default)s)"
    )
    p.add_argument("--timeout", type=float, default=600.0, help="seconds per answer (default: %(default)s)")
    p.add_argument(
        "--keep-truncated", action="store_true", help="also write conversations whose last answer is truncated"
    )
    p.add_argument("--num-prompts", type=cli.at_least_one, metavar="N", help="use the first N prompts (default: all)")
    p.add_argument("--shard", metavar="I/N", help="every N-th prompt, starting with number I (0 <= I < N)")
    return p


def read_shard(text: str | None) -> tuple[int, int]:
    """(i, n) of 'i/n'. Raises UserError for anything else."""
    parts = (text or "0/1").split("/")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts) or not int(parts[0]) < int(parts[1]):
        raise UserError(f"--shard {text}: expected I/N with 0 <= I < N")
    return int(parts[0]), int(parts[1])


def shard_path(output: str, shard: tuple[int, int]) -> Path:
    """Output file of a shard: train-00003-of-00016.jsonl for train.jsonl and shard 3/16."""
    path = Path(output)
    return path if shard[1] == 1 else path.with_name(f"{path.stem}-{shard[0]:05d}-of-{shard[1]:05d}{path.suffix}")


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Request parameters beyond OpenAI's. Raises UserError if --extra-body is not a JSON object, or sets what this tool
    sets, which it would replace."""
    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise UserError(f"--extra-body is not JSON ({error})") from None
    if not isinstance(extra, dict):
        raise UserError(f"--extra-body {args.extra_body}: expected a JSON object")
    if set_here := sorted(extra.keys() & SET_HERE):
        raise UserError(f"--extra-body replaces {', '.join(set_here)} of every request: give its flag, or leave it out")
    return {**extra, **({} if args.top_k is None else {"top_k": args.top_k})}


def template_kwargs(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template, from --chat-template-kwargs or --extra-body. Raises UserError for both."""
    from megatron_spec.data.conversations import read_kwargs

    inside = extra.pop("chat_template_kwargs", None)
    if inside is not None and args.chat_template_kwargs is not None:
        raise UserError("--chat-template-kwargs and chat_template_kwargs in --extra-body: give one of them")
    return read_kwargs(inside or args.chat_template_kwargs or {}, "chat_template_kwargs")


def check(args: argparse.Namespace) -> None:
    """Raise UserError for invalid values, before any request."""
    cli.check_urls(*args.url)
    if args.timeout <= 0:
        raise UserError(f"--timeout {args.timeout}: expected a positive number of seconds")
    if args.temperature is not None and args.temperature < 0:
        raise UserError(f"--temperature {args.temperature}: expected a number of at least 0")
    for name in ("top_p", "top_k", "seed") if args.temperature == 0 else ():
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs a --temperature above 0, found 0: leave it out")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: expected a number above 0 and at most 1")
    if not Path(args.data_path).is_file():
        raise UserError(f"--data-path {args.data_path}: no such file")
    from megatron_spec.generation.prompts import read_prompts

    read_prompts(args.data_path, 1)  # a file without prompts is refused now, not when a server has answered


def generate(args: argparse.Namespace) -> None:
    """Request and write the answers. Raises UserError for invalid input, or if no server answers."""
    shard, extra = read_shard(args.shard), extra_body(args)
    kwargs = template_kwargs(args, extra)
    from tqdm import tqdm

    from megatron_spec.generation.prompts import iter_prompts
    from megatron_spec.generation.server import ServerOptions, Totals, generate_from_server

    sampling = {k: getattr(args, k) for k in ("temperature", "top_p", "max_tokens") if getattr(args, k) is not None}
    options = ServerOptions(
        tuple(args.url), args.model, os.environ.get("OPENAI_API_KEY", "none"), sampling, extra, args.system_prompt,
        args.concurrency, args.retries, args.keep_truncated, args.timeout, args.seed, kwargs,
    )  # fmt: skip
    check(args)
    prompts = islice(iter_prompts(args.data_path, args.num_prompts), shard[0], None, shard[1])
    output = shard_path(args.output_path, shard)
    if output.resolve() == Path(args.data_path).resolve():
        raise UserError(f"--output-path {output} is the file of the prompts: give another one")
    with tqdm(unit=" conversations", mininterval=0.5 if sys.stderr.isatty() else 30) as bar:

        def report(totals: Totals) -> None:
            summary = f"{totals.speed:.0f} tokens/s, {totals.rejected} rejected, {totals.retries} retries"
            bar.set_postfix_str(summary, refresh=False)
            bar.update(totals.written + totals.rejected - bar.n)

        totals = generate_from_server(prompts, output, options, report)
    if totals.unanswered:
        raise UserError(f"{totals.unanswered} conversations were not answered: start again to request only these")


if __name__ == "__main__":
    cli.run(make_parser(), generate)
