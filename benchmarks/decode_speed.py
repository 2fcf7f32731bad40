"""Speed of answers at batch 1, with a draft and without.

    python benchmarks/decode_speed.py --base QWEN05 --draft DRAFT --prompts code.jsonl chat.jsonl --questions 20

DRAFT is an exported folder or a draft checkpoint. Every set of questions (a file; only first questions) is answered one
question at a time, by the base alone and with the draft, after a first pass in which CUDA graphs are recorded; the
shortest of three counts. One line of JSON per set, with tokens per second with the prefill and without it and the ratio
of both; then one with the
milliseconds of a step's phases, each a graph of its own (step of the base; proposal, verification, and taking in what
was accepted), and of a whole step as it is decoded (`cycle`), and the kernels of a step by kind.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, ParallelConfig, UserError
from megatron_spec.decoding.costs import Costs, now


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--base", required=True, metavar="DIR")
    p.add_argument("--draft", metavar="DIR", help="exported draft or checkpoint (default: the base alone)")
    p.add_argument("--prompts", required=True, nargs="+", metavar="JSONL", help="question files, one set each")
    p.add_argument("--questions", type=cli.at_least_one, default=20, help="of each set (default: 20)")
    p.add_argument("--max-new-tokens", type=cli.at_least_one, default=256)
    p.add_argument("--max-draft-len", type=cli.at_least_one, help="with --draft (default: 4)")
    p.add_argument("--sa-threshold", type=cli.at_least_one, metavar="N", help="a lookup beside the draft")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--phase-tokens", type=cli.at_least_one, default=200, help="for the phases (default: 200)")
    p.add_argument("--plain", action="store_true", help="no fast paths")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return p


REPEATS = 3
"""Of every measurement; the shortest counts."""


class Bench:
    """Base, draft and questions."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from benchmarks.comparison_flags import check_sets
        from megatron_spec.checkpoint.spec import locked
        from megatron_spec.commands.decode_inputs import load_models, resolve
        from megatron_spec.data.chat import ChatEncoder
        from megatron_spec.generation.prompts import Dialogue, ask_all, read_prompts
        from megatron_spec.runtime import distributed

        for name in ("sa_threshold", "max_draft_len") if args.draft is None else ():
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs --draft: leave it out for the base alone")
        check_sets(args.prompts)
        exported = args.draft is not None and Path(args.draft, "config.json").is_file()
        checkpoint = args.draft is not None and not exported
        config = DecodeConfig(
            max_new_tokens=args.max_new_tokens, batch_size=1, temperature=args.temperature,
            sa_threshold=args.sa_threshold, speculative_model=args.draft if exported else None,
        )  # fmt: skip
        if args.draft is not None:
            config = config.replace(max_draft_len=args.max_draft_len or 4)
        with locked(args.draft) if checkpoint else nullcontext(None) as folder:
            inputs = resolve(folder, args.base, config, ParallelConfig(), None, args.draft is not None)
            models = load_models(inputs, distributed.initialize(), getattr(torch, args.dtype), args.plain, "local")
        self.base, self.draft, self.config = models.base, models.draft, inputs.decode
        self.alone = DecodeConfig(max_new_tokens=args.max_new_tokens, batch_size=1, temperature=args.temperature)
        self.stop_ids = inputs.stop_ids
        encoder = ChatEncoder(inputs.tokenizer, self.stop_ids, vocab_size=self.base.vocab_size)
        limit = self.base.config.max_position_embeddings
        self.sets: dict[str, list[list[int]]] = {}
        for file in args.prompts:
            asked = ask_all(map(Dialogue, read_prompts(file, args.questions)), encoder, limit)
            self.sets[Path(file).stem] = [ids for _, ids in asked]
            if not asked:
                raise UserError(f"--prompts {file}: no question fits the base's {limit} positions")

    def speed(self, ids: list[list[int]], draft: Any, config: DecodeConfig) -> tuple[dict[str, float], list[list[int]]]:
        """(tokens per second with and without the prefill, tokens per step of the base), and the texts."""
        from megatron_spec.decoding.engine import decode
        from megatron_spec.decoding.session import DecodeSession

        seconds, found = {}, []
        for most in (1, config.max_new_tokens):
            session, taken = DecodeSession(), []
            for _ in range(1 + REPEATS):
                start, found = now(), []
                for question in ids:
                    found += decode(
                        self.base,
                        [question],
                        config.replace(max_new_tokens=most),
                        self.stop_ids,
                        draft,
                        session=session,
                    )
                taken.append(now() - start)
            seconds[most] = min(taken[1:])  # the first records graphs; the others differ by what else runs
        tokens, steps = sum(len(g.tokens) for g in found), sum(g.num_base_forwards - 1 for g in found)
        decoding = max(seconds[config.max_new_tokens] - seconds[1], 1e-9)
        return {
            "tokens_per_second": round(tokens / seconds[config.max_new_tokens], 1),
            "without_prefill": round((tokens - len(found)) / decoding, 1),
            "tokens_per_step": round((tokens - len(found)) / max(steps, 1), 3),
        }, [g.tokens for g in found]  # fmt: skip

    def line(self, name: str) -> dict[str, Any]:
        """Figures of a set."""
        ids = self.sets[name]
        alone, texts = self.speed(ids, None, self.alone)
        line: dict[str, Any] = {"set": name, "questions": len(ids), "base": alone}
        if self.config.decoding_type is not None:
            with_draft, others = self.speed(ids, self.draft, self.config)
            names = ("tokens_per_second", "without_prefill")  # answers of one token take no time after the prefill
            ratios = {k: round(with_draft[k] / alone[k], 3) if alone[k] else None for k in names}
            same = sum(a == b for a, b in zip(texts, others, strict=True)) / len(ids)
            line |= {"draft": with_draft, "ratio": ratios, "same_texts": same}
        return line

    def phases(self, draft: Any, config: DecodeConfig, tokens: int) -> dict[str, Any]:
        """Milliseconds of a step's phases, and of a whole step with its kernels, for the longest question."""
        from benchmarks.device_time import profiled
        from megatron_spec.decoding.engine import decode
        from megatron_spec.decoding.session import DecodeSession

        question = max((ids for some in self.sets.values() for ids in some), key=len)
        config, costs = config.replace(max_new_tokens=tokens), Costs()
        for _ in range(2):
            costs = Costs()
            decode(self.base, [question], config, set(), draft, costs=costs)
        found = {phase: round(costs.typical(phase) * 1e3, 3) for phase in ("draft", "base", "observe")}
        session = DecodeSession()

        def steps() -> int:
            """Decode."""
            answer = decode(self.base, [question], config, set(), draft, session=session)[0]
            return answer.num_base_forwards - 1

        for _ in range(2):
            steps()
        start = now()
        count = steps()
        return {**found, "cycle": round((now() - start) / max(count, 1) * 1e3, 3), "kernels": profiled(steps)}


def measure(args: argparse.Namespace) -> None:
    """Prints the lines."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    bench = Bench(args)

    def write(line: dict[str, Any]) -> None:
        """Print a line."""
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    for name in bench.sets:
        write(bench.line(name))
    write({"phases": "base", **bench.phases(None, bench.alone, args.phase_tokens)})
    if bench.config.decoding_type is not None:
        write({"phases": "draft", **bench.phases(bench.draft, bench.config, args.phase_tokens)})


if __name__ == "__main__":
    cli.run(make_parser(), measure)
