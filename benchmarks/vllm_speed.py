"""Tokens per second of vLLM at batch 1, with a draft and without, on sets of questions.

    python benchmarks/vllm_speed.py --base BASE --draft EXPORT/draft --prompts humaneval.jsonl gsm8k.jsonl

Runs in the environment of vLLM and needs nothing else (megatron_spec need not be installed). Questions are answered
greedily, one at a time, the first turn alone, prefill included. Acceptance length is by vLLM's own counters. Every
engine has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
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
    p.add_argument("--questions", type=int, default=10, help="of each set (default: 10)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--max-model-len", type=int, default=2048)
    p.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    p.add_argument("--output", metavar="JSON")
    return p


def questions(path: Path, count: int) -> list[list[dict[str, str]]]:
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


def measure(args: argparse.Namespace, draft: str | None) -> dict[str, dict[str, float]]:
    """Of every set: tokens, seconds, acceptance length."""
    from vllm import LLM, SamplingParams

    speculative: dict[str, Any] | None = None
    if draft:
        speculative = {"method": args.method, "model": draft, "num_speculative_tokens": args.max_draft_len}
        speculative |= {"parallel_drafting": True} if args.parallel_drafting else {}
    llm = LLM(
        args.base, speculative_config=speculative, max_model_len=args.max_model_len, max_num_seqs=4,
        gpu_memory_utilization=args.gpu_memory_utilization, enable_prefix_caching=False, disable_log_stats=False,
    )  # fmt: skip
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


def in_a_process(args: argparse.Namespace, draft: str | None) -> dict[str, dict[str, float]]:
    """`measure`, of which nothing stays on the GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, args, draft).result()


def main() -> None:
    """Prints a table, and writes --output."""
    args = make_parser().parse_args()
    alone = in_a_process(args, None)
    drafted = in_a_process(args, args.draft) if args.draft else {}
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
