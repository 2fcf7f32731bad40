"""Benchmark a server with an OpenAI-compatible API (vLLM, SGLang, TensorRT-LLM, ...), or compare two.

    python tools/bench_server.py --url http://localhost:8000 --data prompts.jsonl --concurrency 1,2,4,8
    python tools/bench_server.py --url http://localhost:8000 --compare http://localhost:8001 --data prompts.jsonl

Per concurrency: tokens per second, percentiles of time to first token, latency and time between tokens, and the
acceptance length if the server reports it. With --compare the second server answers the same prompts after the first,
level by level; at temperature 0 the share of identical answers is shown. The API key, if any, is read from
OPENAI_API_KEY. Needs openai (megatron-spec[serving]).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import object_in, require_own, write_json
from megatron_spec.runtime.folders import require_writable
from megatron_spec.serving.measure import Level, Messages, Server, run_level, warm_up


def levels(text: str) -> tuple[int, ...]:
    """An argparse type: '1,2,4' -> (1, 2, 4)."""
    found = cli.numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"concurrency must be at least 1, found {min(found)}")
    return found


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--url", required=True, help="server, for example http://localhost:8000")
    p.add_argument("--compare", metavar="URL", help="second server")
    p.add_argument(
        "--data",
        required=True,
        metavar="JSONL",
        help="question file or conversations; what comes before the first answer is sent",
    )
    p.add_argument("--num-prompts", type=cli.at_least_one, metavar="N", help="use the first N (default: all)")
    p.add_argument(
        "--concurrency", type=levels, default=(1,), help="requests in flight, for example 1,2,4 (default: 1)"
    )
    p.add_argument("--max-tokens", type=cli.at_least_one, default=128, help="maximum tokens per answer (default: 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="of the answers (default: 0, the most likely token)")
    p.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens (vLLM, SGLang)")
    p.add_argument(
        "--warm-up", type=cli.at_least_zero, default=2, metavar="N", help="requests before the measurement (default: 2)"
    )
    p.add_argument("--model", help="name of the served model (default: the server's first)")
    p.add_argument("--output", metavar="JSON", help="all figures")
    return p


def row(name: str, level: Level) -> str:
    """One line of the table."""
    first, latency, between = level.first_token_ms, level.latency_ms, level.between_tokens_ms
    length = level.acceptance.get("acceptance_length")
    return (
        f"| {name} | {level.concurrency} | {level.tokens_per_second:.1f} | "
        + " | ".join(
            f"{d.get('p50', 0):.1f} / {d.get('p90', 0):.1f} / {d.get('p99', 0):.1f}" for d in (first, latency, between)
        )
        + f" | {'-' if length is None else f'{length:.3f}'} |\n"
    )


HEAD = (
    "| server | concurrency | tokens/s | first token, ms (p50 / p90 / p99) | latency, ms | between tokens, ms | "
    "acceptance length |\n|---|---|---|---|---|---|---|\n"
)


async def measure(args: argparse.Namespace, prompts: list[Messages]) -> dict[str, Any]:
    """Run all levels, printing the table row by row."""
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.ignore_eos:
        options["extra_body"] = {"ignore_eos": True}
    urls = [args.url] + ([args.compare] if args.compare else [])
    key = os.environ.get("OPENAI_API_KEY", "none")  # no flag: command lines are shown to all users of a machine
    servers = [Server(url, args.model, options, key) for url in urls]
    for server in servers:
        await warm_up(server, prompts, args.warm_up)
    report: dict[str, Any] = {"prompts": len(prompts), "options": options, "servers": urls, "levels": []}
    sys.stdout.write(HEAD)
    for concurrency in args.concurrency:
        found = []
        texts = []
        for name, server in zip("AB", servers, strict=False):
            level, answers = await run_level(server, prompts, concurrency)
            sys.stdout.write(row(name if args.compare else args.url, level))
            sys.stdout.flush()
            found.append(level)
            texts.append(answers)
        line: dict[str, Any] = {"servers": [asdict(level) for level in found]}
        if args.compare:
            a, b = (level.tokens_per_second for level in found)
            line["speedup"] = a / b if b else None
            line["equal_answers"] = sum(a == b for a, b in zip(*texts, strict=True)) / len(prompts)
            equal = f"equal answers: {line['equal_answers']:.1%}"
            times = "-" if line["speedup"] is None else f"{line['speedup']:.3f} x"
            sys.stdout.write(f"| A / B | {concurrency} | {times} | {equal} | | | |\n")
        report["levels"].append(line)
    return report


def check_output(output: str, data: str) -> None:
    """Raise UserError for an output that cannot be written, or that would replace something else."""
    if Path(output).resolve() == Path(data).resolve():
        raise UserError(f"--data {data} is also the output: it would be overwritten")
    require_own(output, lambda path: {"servers", "levels"} <= object_in(path).keys(), "a result of bench_server.py")
    require_writable(Path(output).absolute().parent)  # measuring takes long


def main(args: argparse.Namespace) -> None:
    """Read the prompts, measure, report. Raises UserError if a server does not answer."""
    from megatron_spec.generation.prompts import read_prompts

    cli.check_urls(args.url, *filter(None, [args.compare]))
    if args.output:
        check_output(args.output, args.data)
    prompts = read_prompts(args.data, args.num_prompts)
    for prompt in prompts:
        if prompt.tools or prompt.template_kwargs:
            raise UserError(f"{prompt.where}: tools and chat_template_kwargs are not sent, expected messages alone")
    if args.temperature < 0:
        raise UserError(f"--temperature {args.temperature}: expected a number of at least 0")
    report = asyncio.run(measure(args, [list(p.rounds[0]) for p in prompts]))
    if args.output:
        write_json(args.output, report)


if __name__ == "__main__":
    cli.run(make_parser(), main)
