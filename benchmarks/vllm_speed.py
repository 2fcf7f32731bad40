"""Tokens per second of vLLM, with a draft and without, on sets of questions: one by one, or many together.

    python benchmarks/vllm_speed.py --base BASE --draft EXPORT/draft --prompts humaneval.jsonl gsm8k.jsonl
    python benchmarks/vllm_speed.py --base BASE --prompts humaneval.jsonl gsm8k.jsonl --together 512 1024

Runs in the environment of vLLM and needs nothing else (megatron_spec need not be installed). Only first turns are
asked. Acceptance length is by vLLM's own counters. Every engine has a process of its own.

By default questions are answered greedily, one at a time, prefill included.

--together N ...: N requests at once (max_num_seqs = N), the questions of all sets repeated, or thinned out, to so many;
every answer has exactly --max-new-tokens tokens. A line of JSON for each N, temperature and draft: tokens over seconds,
prefill included, tokenising and text left out, in the second of two equal runs. `generation_throughput.py --together`
counts alike, so the two stand side by side; `prompt_tokens` is the same in both when the prompts are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", required=True, metavar="DIR", help="base model")
    p.add_argument("--draft", metavar="DIR", help="exported draft (default: the base alone is measured)")
    p.add_argument("--method", default="eagle3", help="vLLM's name of the kind of draft (default: eagle3)")
    p.add_argument("--parallel-drafting", action="store_true", help="P-EAGLE")
    p.add_argument("--max-draft-len", type=int, default=4, help="tokens drafted per step (default: 4)")
    p.add_argument("--prompts", required=True, nargs="+", metavar="JSONL", help="question files, one set each")
    p.add_argument("--questions", type=int, help="of each set (default: 10; with --together: all)")
    p.add_argument("--together", type=int, nargs="+", metavar="N", help="requests answered at once")
    p.add_argument("--temperatures", type=float, nargs="+", help="with --together (default: 0 1)")
    p.add_argument(
        "--max-cudagraph", type=int, metavar="N",
        help="with --together: largest batch recorded as a CUDA graph (default: vLLM's own limit)",
    )  # fmt: skip
    p.add_argument("--max-new-tokens", type=int, help="(default: 128; with --together: 192)")
    p.add_argument("--max-model-len", type=int, default=2048)
    p.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    p.add_argument("--output", metavar="JSON")
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line with the defaults of the mode; flags of the other mode and counts below 1 are errors."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.together is None:
        if given := [f"--{n.replace('_', '-')}" for n in ("temperatures", "max_cudagraph") if getattr(args, n)]:
            parser.error(f"{', '.join(given)}: only with --together")
        args.questions, args.max_new_tokens = args.questions or 10, args.max_new_tokens or 128
        return args
    args.temperatures, args.max_new_tokens = args.temperatures or [0.0, 1.0], args.max_new_tokens or 192
    if min(args.together) < 1:
        parser.error(f"--together {min(args.together)}: expected 1 or more")
    return args


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` items evenly from all: each repeated, or some left out."""
    return [items[i * len(items) // count] for i in range(count)]


def questions(path: Path, count: int | None) -> list[list[dict[str, str]]]:
    """The first of the `turns` of `count` lines, as messages."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        found.append([{"role": "user", "content": json.loads(line)["turns"][0]}])
    return found


def counted(llm: Any) -> tuple[float, float]:
    """(drafts, accepted tokens) so far."""
    found = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    kinds = ("num_drafts", "num_accepted_tokens")
    return tuple(next((v for k, v in found.items() if k.endswith(kind)), 0.0) for kind in kinds)  # type: ignore[return-value]


def engine(args: argparse.Namespace, draft: str | None, sequences: int, **more: Any) -> Any:
    """vLLM's LLM for so many sequences at once."""
    from vllm import LLM

    speculative: dict[str, Any] | None = None
    if draft:
        speculative = {"method": args.method, "model": draft, "num_speculative_tokens": args.max_draft_len}
        speculative |= {"parallel_drafting": True} if args.parallel_drafting else {}
    return LLM(
        args.base, speculative_config=speculative, max_model_len=args.max_model_len, max_num_seqs=sequences,
        gpu_memory_utilization=args.gpu_memory_utilization, enable_prefix_caching=False, disable_log_stats=False,
        **more,
    )  # fmt: skip


def prompt_ids(llm: Any, paths: list[Path], count: int | None) -> list[list[int]]:
    """Token ids of every question, with the model's chat template."""
    tokenizer, found = llm.get_tokenizer(), []
    for messages in (m for path in paths for m in questions(path, count)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return found


def measure_together(args: argparse.Namespace, draft: str | None, requests: int) -> list[dict[str, Any]]:
    """A line for every temperature. Raises SystemExit when an answer does not have --max-new-tokens tokens."""
    from vllm import SamplingParams, __version__

    graphs = {"compilation_config": {"max_cudagraph_capture_size": args.max_cudagraph}} if args.max_cudagraph else {}
    llm = engine(args, draft, requests, **graphs)
    ids = spread(prompt_ids(llm, [Path(p) for p in args.prompts], args.questions), requests)
    prompts, lines, length = [{"prompt_token_ids": x} for x in ids], [], args.max_new_tokens
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for _ in range(2):  # the first run warms up
            before, start = counted(llm), time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            seconds, after = time.perf_counter() - start, counted(llm)
        counts = {len(x.outputs[0].token_ids) for x in found}
        if counts != {length}:
            raise SystemExit(f"answers of {sorted(counts)} tokens, expected {length}: is --max-model-len too small?")
        drafts, accepted = (now - then for now, then in zip(after, before, strict=True))
        lines.append({
            "engine": f"vllm {__version__}", "draft": bool(draft), "requests": requests, "temperature": temperature,
            "prompt_tokens": sum(map(len, ids)), "tokens": requests * length, "seconds": round(seconds, 3),
            "tokens_per_second": round(requests * length / seconds),
            "acceptance_length": round(1 + accepted / drafts, 3) if drafts else None,
        })  # fmt: skip
    return lines


def measure(args: argparse.Namespace, draft: str | None) -> dict[str, dict[str, float]]:
    """Of every set, one question at a time: tokens, seconds, acceptance length."""
    from vllm import SamplingParams

    llm = engine(args, draft, 4)
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    found = {}
    for path in map(Path, args.prompts):
        before, tokens, start = counted(llm), 0, time.perf_counter()
        for messages in questions(path, args.questions):
            tokens += len(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].token_ids)
        seconds = time.perf_counter() - start
        drafts, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
        length = 1 + accepted / drafts if drafts else 1.0
        found[path.stem] = {"tokens": tokens, "seconds": seconds, "acceptance_length": length}
    return found


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result, of which nothing stays on the GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def throughput(args: argparse.Namespace) -> None:
    """Print the lines of --together, and write --output."""
    lines = []
    for requests in args.together:
        for draft in dict.fromkeys((None, args.draft)):
            for line in in_a_process(measure_together, args, draft, requests):
                print(json.dumps(line), flush=True)
                lines.append(line)
    if args.output:
        Path(args.output).write_text(json.dumps(lines, indent=1), encoding="utf-8")


def main() -> None:
    """Prints what was measured, and writes --output."""
    args = parse()
    if args.together:
        throughput(args)
        return
    alone = in_a_process(measure, args, None)
    drafted = in_a_process(measure, args, args.draft) if args.draft else {}
    print("| set | tokens/s alone | tokens/s with the draft | speed-up | acceptance length |\n|---|---|---|---|---|")
    ratios = []
    for name, one in alone.items():
        speed, row = one["tokens"] / one["seconds"], f"| {name} | {one['tokens'] / one['seconds']:.0f} |"
        if name in drafted:
            other = drafted[name]
            ratios.append(other["tokens"] / other["seconds"] / speed)
            row += f" {other['tokens'] / other['seconds']:.0f} | {ratios[-1]:.2f} | {other['acceptance_length']:.2f} |"
        print(row)
    if ratios:
        print(f"mean speed-up {statistics.mean(ratios):.2f}")
    if args.output:
        Path(args.output).write_text(json.dumps({"alone": alone, "draft": drafted}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
