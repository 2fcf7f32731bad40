"""Throughput of reading conversations: JSON -> template -> tokens and masks on disk -> packed rows, in tokens/s.

    python benchmarks/data_throughput.py --tokenizer SMOLLM2 --megabytes 200 --num-workers 2

Without --data it makes conversations of one to three turns from the source code of this machine's Python standard
library (answers of 200 to 2,500 characters). Process start-up is included.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from megatron_spec import cli


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--tokenizer", required=True, metavar="DIR")
    p.add_argument("--data", metavar="JSONL", help="conversations (default: made from source text)")
    p.add_argument(
        "--megabytes", type=cli.at_least_one, default=200, help="size of the conversations made (default: 200)"
    )
    p.add_argument("--seq-length", type=cli.at_least_one, default=2048)
    p.add_argument("--num-workers", type=cli.at_least_one, metavar="N", help="processes (default: all processors)")
    return p


def make_conversations(path: Path, megabytes: int, untidy: bool = False) -> None:
    """Write conversations made from source code; reproducible on one Python version.

    Args:
        untidy: of every hundred, two are duplicates, one has a question without an answer, one an unknown role.
    """
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources)
    numbers = random.Random(0)

    def cut(shortest: int, longest: int) -> str:
        begin = numbers.randrange(len(text) - longest)
        return text[begin : begin + numbers.randrange(shortest, longest)].strip() or "x"

    size = count = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            talk = []
            for _ in range(numbers.choice((1, 1, 2, 3))):
                talk += [{"from": "human", "value": cut(50, 300)}, {"from": "gpt", "value": cut(200, 2500)}]
            if untidy and count % 100 == 7:
                talk.pop()
            if untidy and count % 100 == 8:
                talk[0]["from"] = "judge"
            line = json.dumps({"id": str(count), "conversations": talk}, ensure_ascii=False) + "\n"
            size += file.write(line * (2 if untidy and count % 50 == 3 else 1))
            count += 1


def measure(args: argparse.Namespace) -> None:
    """Measure and print one line of JSON."""
    from megatron_spec.data.loader import ConversationDataset
    from megatron_spec.data.packing import pack
    from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
    from megatron_spec.data.workers import usable_cpus

    workers = usable_cpus() if args.num_workers is None else args.num_workers
    tokenizer = load_tokenizer(args.tokenizer)
    stops = stop_token_ids(args.tokenizer, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(args.data or f"{folder}/data.jsonl")
        if args.data is None:
            make_conversations(data, args.megabytes)
        start = time.perf_counter()
        dataset = ConversationDataset(data, tokenizer, args.seq_length, stops, f"{folder}/cache", workers)
        read = time.perf_counter()
        rows = pack(dataset.lengths, args.seq_length)
        packed = time.perf_counter()
        ConversationDataset(data, tokenizer, args.seq_length, stops, f"{folder}/cache", workers)
        again = time.perf_counter()
        tokens = dataset.store.meta["tokens"]
        report = {
            "tokens_per_second": round(tokens / (packed - start)), "tokens": tokens, "workers": workers,
            "conversations": len(dataset), "characters_per_token": round(data.stat().st_size / tokens, 2),
            "tokenise_s": round(read - start, 1), "pack_s": round(packed - read, 2), "rows": len(rows),
            "from_cache_s": round(again - packed, 2),
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "peak_mib_of_a_worker": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        }  # fmt: skip
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    cli.run(make_parser(), measure)
