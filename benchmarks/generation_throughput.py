"""Speed of writing answers with the frozen base: decoding alone, and with everything that generate.py does to a file.

    python benchmarks/generation_throughput.py --base QWEN05 --prompts train.jsonl --batch-sizes 512 1024

One line of JSON per batch size and temperature, after a run of a few tokens that warms up. `host_ms_per_step` is the
time of a step in which the host does not wait for the device: launches, and what is not hidden behind the device. With
a GPU, decoding is bound by the host where it is close to `ms_per_step`. `file_tokens_per_second` includes prompts,
tokenising, chat template and writing, and recording CUDA graphs.

--together N ... prints, instead, lines that stand beside those of `vllm_speed.py --together`: N requests at once, the
questions of all files repeated, or thinned out, to so many; every answer has exactly --max-new-tokens tokens. Tokens
over seconds, prefill included, tokenising and text left out, in the second of two equal runs.

--questions N draws N distinct questions instead of answering: no prompts are needed, and a batch size is the number of
draws side by side (`generate.py --question-batch-size`). `shares` says what became of the draws; `steps` and `refills`
(prefills) are counted, `ms_per_refill_host` is the time in which the host starts one. CUDA graphs are recorded in
the measured time, as in `generate.py`; kernels are compiled before.

--profile prints, instead, where the device's time goes: per batch size and temperature a line with kernels per step,
shares by kind and the longest kernels, of --profile-tokens tokens of one batch whose graphs are recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import DecodeConfig, UserError
from megatron_spec.decoding.costs import Costs, now


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--base", required=True, metavar="DIR")
    p.add_argument("--prompts", nargs="+", metavar="JSONL", help="conversations or questions; only first questions")
    p.add_argument(
        "--questions", type=cli.at_least_one, metavar="N", help="draw N distinct questions, without --prompts"
    )
    p.add_argument("--batch-sizes", type=cli.at_least_one, nargs="+", help="(default: 512)")
    p.add_argument("--together", type=cli.at_least_one, nargs="+", metavar="N", help="requests answered at once")
    p.add_argument("--temperatures", type=float, nargs="+", help="(default: 0 and 1; questions: 1)")
    p.add_argument("--max-new-tokens", type=cli.at_least_one, help="(default: 512; else 192)")
    p.add_argument("--limit", type=cli.at_least_one, default=4096, help="prompts (default: 4096)")
    p.add_argument("--profile", action="store_true", help="shares of the device's time by kind of kernel")
    p.add_argument("--profile-tokens", type=cli.at_least_one, default=48, help="of an answer (default: 48)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return p


class HostCosts(Costs):
    """Seconds that the host spends in each phase; does not wait for the device."""

    apart = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See Costs."""
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    @property
    def steps(self) -> int:
        """Steps after the prefills."""
        return len(self.seconds.get("cycle", [])) + len(self.seconds.get("base", []))


class Bench:
    """A base with its tokenizer and prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from megatron_spec.checkpoint.base_import import inspect_base, load_base
        from megatron_spec.data.chat import ChatEncoder
        from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
        from megatron_spec.generation.prompts import Dialogue, ask_all, read_prompts
        from megatron_spec.runtime import distributed

        self.tokenizer = load_tokenizer(args.base)
        self.stop_ids = set(stop_token_ids(args.base, self.tokenizer))
        self.base = load_base(inspect_base(args.base), distributed.initialize(), (), getattr(torch, args.dtype))
        prompts = [replace(p, rounds=p.rounds[:1]) for path in args.prompts or () for p in read_prompts(path)]
        prompts = prompts[: args.limit]
        encoder = ChatEncoder(self.tokenizer, self.stop_ids, vocab_size=self.base.vocab_size)
        asked = ask_all(map(Dialogue, prompts), encoder, self.base.config.max_position_embeddings)
        self.dialogues, self.ids = [d for d, _ in asked], [ids for _, ids in asked]
        if args.prompts and not asked:
            raise UserError(f"--prompts {' '.join(args.prompts)}: no question fits the base's positions")

    def run(self, config: DecodeConfig) -> dict[str, Any]:
        """One line."""
        from megatron_spec.decoding.engine import decode
        from megatron_spec.generation.synthesize import synthesize_to_file

        seeds, costs = [d.seed(config.seed) for d in self.dialogues], HostCosts()
        prompts = [d.prompt for d in self.dialogues]
        decode(self.base, self.ids[: config.batch_size], config.replace(max_new_tokens=4), self.stop_ids)
        start = now()
        found = decode(self.base, self.ids, config, self.stop_ids, seeds=seeds, costs=costs)
        alone = now() - start
        with tempfile.TemporaryDirectory() as folder:
            start = now()
            synthesize_to_file(
                self.base, self.tokenizer, prompts, config, Path(folder, "out.jsonl"), stop_ids=self.stop_ids
            )
            written = now() - start
        tokens, steps = sum(len(g.tokens) for g in found), costs.steps
        waits = sum(costs.seconds["read"])
        return {
            "batch_size": config.batch_size, "temperature": config.temperature, "answers": len(found),
            "tokens": tokens, "steps": steps, "ms_per_step": round(alone / steps * 1e3, 3),
            "host_ms_per_step": round((alone - waits) / steps * 1e3, 3),
            "tokens_per_second": round(tokens / alone), "file_tokens_per_second": round(tokens / written),
            "file_ms_per_answer": round((written - alone) / len(found) * 1e3, 3),
        }  # fmt: skip

    def draw(self, count: int, config: DecodeConfig) -> dict[str, Any]:
        """One line of --questions."""
        from megatron_spec.data.chat import ChatEncoder
        from megatron_spec.generation.questions import DRAWS_PER_QUESTION, distinct, draw_questions

        encoder, costs, outcomes, seen = ChatEncoder(self.tokenizer), HostCosts(), Counter[str](), set[str]()
        warm = config.replace(max_new_tokens=4)
        for _ in draw_questions(self.base, encoder, range(config.batch_size), warm, self.stop_ids):
            pass
        start = now()
        with closing(
            draw_questions(self.base, encoder, range(DRAWS_PER_QUESTION * count + 100), config, self.stop_ids, costs)
        ) as draws:
            for found in draws:
                distinct(found, seen, count - len(seen), outcomes)
                if len(seen) == count:
                    break
            seconds = now() - start
        waits, drawn = sum(costs.seconds["read"]), outcomes.total()
        return {
            "batch_size": config.batch_size, "temperature": config.temperature, "questions": len(seen), "draws": drawn,
            "shares": {name: round(n / drawn, 3) for name, n in outcomes.items()}, "seconds": round(seconds, 2),
            "questions_per_second": round(len(seen) / seconds, 1), "draws_per_second": round(drawn / seconds, 1),
            "steps": costs.steps, "refills": len(costs.seconds["prefill"]),
            "ms_per_step": round(seconds / costs.steps * 1e3, 3),
            "host_ms_per_step": round((seconds - waits) / costs.steps * 1e3, 3),
            "ms_per_refill_host": round(sum(costs.seconds["prefill"]) / len(costs.seconds["prefill"]) * 1e3, 3),
        }  # fmt: skip

    def together(self, config: DecodeConfig) -> dict[str, Any]:
        """One line of --together: as many requests as the batch size, with CUDA graphs recorded in the first run."""
        from benchmarks.vllm_speed import spread
        from megatron_spec.decoding.engine import decode
        from megatron_spec.decoding.session import DecodeSession

        ids, session, length = spread(self.ids, config.batch_size), DecodeSession(), config.max_new_tokens
        for _ in range(2):
            start = now()
            found = decode(self.base, ids, config, set(), session=session)
            seconds = now() - start
        if counts := {len(g.tokens) for g in found} - {length}:
            raise UserError(f"answers of {sorted(counts)} tokens, expected {length}: the base's context is too short")
        return {
            "engine": "megatron_spec", "requests": len(ids), "temperature": config.temperature,
            "prompt_tokens": sum(map(len, ids)), "tokens": len(ids) * length, "seconds": round(seconds, 3),
            "tokens_per_second": round(len(ids) * length / seconds),
        }  # fmt: skip

    def profile(self, config: DecodeConfig) -> dict[str, Any]:
        """One line of --profile: of a batch that was decoded before, so all of its graphs are recorded."""
        from benchmarks.device_time import profiled
        from megatron_spec.decoding.engine import decode
        from megatron_spec.decoding.session import DecodeSession

        # Prompts of one length, or they would be decoded in groups; no stop, so all rows run to the end.
        longest, session = sorted(self.ids, key=len)[-config.batch_size :], DecodeSession()

        def steps() -> int:
            """Decode."""
            costs = HostCosts()
            decode(self.base, longest, config, set(), costs=costs, session=session)
            return costs.steps

        for _ in range(2):
            steps()
        return {"batch_size": config.batch_size, "temperature": config.temperature, **profiled(steps)}


def measure(args: argparse.Namespace) -> None:
    """Prints the lines."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if args.together and (args.profile or args.batch_sizes):
        raise UserError("--together N sets the batch size and has no profile: leave --batch-sizes and --profile out")
    if (args.questions is None) == (args.prompts is None):
        raise UserError("give --prompts to answer, or --questions N to draw questions")
    if args.questions and (args.together or args.profile):
        raise UserError("--questions is for drawing alone: leave --together and --profile out")
    if not args.together and (args.profile_tokens if args.profile else args.max_new_tokens) == 1:
        raise UserError("an answer of one token has no step to time: give 2 tokens or more")
    short = args.together or args.questions
    bench, length = Bench(args), args.max_new_tokens or (192 if short else 512)
    for size in args.together or args.batch_sizes or [512]:
        for temperature in args.temperatures or ([1.0] if args.questions else [0.0, 1.0]):
            if args.questions and temperature <= 0:
                raise UserError(f"--questions: expected temperatures greater than 0, found {temperature}")
            config = DecodeConfig(batch_size=size, temperature=temperature, max_new_tokens=length)
            if args.questions:
                line = bench.draw(args.questions, config)
            elif args.together:
                line = bench.together(config)
            elif args.profile:
                line = bench.profile(config.replace(max_new_tokens=args.profile_tokens))
            else:
                line = bench.run(config)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    cli.run(make_parser(), measure)
