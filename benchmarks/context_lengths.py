"""What the base accepts of drafts that were trained on short and on long texts, by the length of the context.

    python benchmarks/context_lengths.py --base BASE --prompts mt_bench.jsonl --output runs/context --bf16

1. The base writes conversations (or --data has them). They are joined, in order, into dialogues of as many tokens as
   each of --train-lengths; the last eighth of them is held out.
2. EAGLE-3 trains on each length for --steps of --tokens-per-step, once with full attention and once with a window of
   --window rows: the same conversations, the same number of tokens.
3. For each of --lengths every question follows so many tokens of held-out conversations. The base answers alone and
   with every draft: as trained; those with full attention also with a window in decoding alone, and with the YaRN that
   `export.py --export-yarn-factor` writes for the longest context.

OUTPUT/results.jsonl gets a line for each draft and length as soon as it is there, OUTPUT/context.md the tables: the
acceptance length with its interval over the questions, and its change against full attention on the same length of
training, paired by question. A second start with the same OUTPUT goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison_flags import add_flags
from megatron_spec import cli
from megatron_spec.config import UserError

if TYPE_CHECKING:
    from benchmarks.comparison import Comparison, Draft

log = logging.getLogger("megatron_spec.context_lengths")

SETTINGS = ("lengths", "train_lengths", "window", "steps", "tokens_per_step")
"""Flags that the figures depend on, besides those of the laboratory."""
Line = dict[str, Any]


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    add_flags(p, conversations=8192, answer_tokens=192, questions=40, max_new_tokens=64, batch_size=40)
    lengths = {"nargs": "+", "type": cli.at_least_one, "metavar": "N"}
    p.add_argument(
        "--train-lengths", default=[512, 4096], help="of the texts trained on (default: 512 4096)", **lengths
    )
    p.add_argument(
        "--lengths", default=[512, 1024, 2048, 4096, 8192], help="of context and answer (default: 512 ... 8192)",
        **lengths,
    )  # fmt: skip
    p.add_argument("--window", type=cli.at_least_one, default=512, help="rows that a draft's row sees (default: 512)")
    p.add_argument("--steps", type=cli.at_least_one, default=200, help="of each training (default: 200)")
    p.add_argument("--tokens-per-step", type=cli.at_least_one, default=16384, help="(default: 16384)")
    p.add_argument("--ttt-steps", type=cli.at_least_one, default=4, help="draft steps in training (default: 4)")
    return p


def check(args: argparse.Namespace, longest: int) -> None:
    """Raise UserError for lengths that the base or the other flags leave no room for.

    Args:
        longest: the base's max_position_embeddings.
    """
    for flag in ("lengths", "train_lengths"):
        name, found = f"--{flag.replace('_', '-')}", getattr(args, flag)
        if max(found) > longest:
            raise UserError(f"{name} {max(found)}: the base's max_position_embeddings is {longest}")
        if len(set(found)) < len(found):
            raise UserError(f"{name} {' '.join(map(str, found))}: expected distinct lengths")
    if max(args.train_lengths) > args.tokens_per_step:
        raise UserError(f"--train-lengths {max(args.train_lengths)} exceeds --tokens-per-step {args.tokens_per_step}")
    if args.ttt_steps > args.window:
        raise UserError(f"--ttt-steps {args.ttt_steps}: more than --window {args.window}")


class Dialogues:
    """Conversations of the base, in order: some to train on, the last eighth held out.

    Attributes:
        trained, held: (messages without system texts, tokens of the conversation alone).
    """

    def __init__(self, path: Path, encoder: Any) -> None:
        from megatron_spec.data.conversations import read_conversations

        found = list(read_conversations(path))
        sizes = [sum(map(len, samples)) for samples in encoder.encode_all(found)]
        every = [([m for m in c.messages if m["role"] != "system"], size) for c, size in zip(found, sizes, strict=True)]
        if len(every) < 8:
            raise UserError(f"{path}: {len(every)} conversations, expected 8 or more: an eighth is held out")
        last = len(every) // 8
        self.trained, self.held = every[:-last], every[-last:]

    def joined(self, length: int) -> Iterator[list[Any]]:
        """Messages of dialogues of about `length` tokens or more: as many conversations in order as it takes."""
        messages: list[Any] = []
        tokens = 0
        for more, size in self.trained:
            messages, tokens = messages + more, tokens + size
            if tokens >= length:
                yield messages
                messages, tokens = [], 0
        if messages:
            yield messages

    def write(self, path: Path, length: int) -> None:
        """A file to train on."""
        lines = [{"conversations": messages} for messages in self.joined(length)]
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    def context(self, first: int, tokens: int) -> list[Any]:
        """Messages of held-out conversations of up to `tokens` tokens: in a circle from number `first` on, those that
        fit, each once."""
        messages: list[Any] = []
        for more, size in self.held[first:] + self.held[:first]:
            if size <= tokens:
                messages, tokens = messages + more, tokens - size
        return messages


def ask(run: Comparison, dialogues: Dialogues, encoder: Any, length: int) -> list[list[int]]:
    """Token ids of every question after a context; with the answer up to `length` tokens.

    Raises UserError for a question that leaves no room for an answer, and when the held-out conversations do not fill
    half of the length.
    """
    from megatron_spec.data.conversations import Conversation
    from megatron_spec.generation.prompts import read_prompts

    asked, room = [], length - run.args.max_new_tokens
    prompts = [p for f in run.args.prompts for p in read_prompts(f, run.args.questions)]
    alone = encoder.prompts([Conversation(list(p.rounds[0]), p.where) for p in prompts])
    for i, (prompt, (_, ids)) in enumerate(zip(prompts, alone, strict=True)):
        if len(ids) > room:
            raise UserError(f"{prompt.where}: {len(ids)} tokens leave no room for an answer in --lengths {length}")
        messages, context = list(prompt.rounds[0]), dialogues.context(7 * i % len(dialogues.held), room - len(ids))
        at = int(messages[0]["role"] == "system")
        messages[at:at] = context  # a system text comes first
        asked.append(encoder.prompts([Conversation(messages, prompt.where)])[0][1])
    if (shortest := min(map(len, asked))) < length // 2:
        raise UserError(
            f"--lengths {length}: held-out conversations fill only {shortest} tokens of a context: give more "
            "--conversations, or a longer --data"
        )
    return asked


def train(run: Comparison, dialogues: Dialogues) -> list[tuple[Draft, int]]:
    """(draft, length of the texts it was trained on): with full attention and with the window."""
    from benchmarks.comparison import Kind

    found, vocab = [], None
    for length in run.args.train_lengths:
        path = run.output / f"train-{length}.jsonl"
        dialogues.write(path, length)
        run.args.seq_length, run.args.global_batch_size = length, max(1, run.args.tokens_per_step // length)
        run.read(path)
        vocab = run.vocab = vocab or run.vocab  # the same for all
        for name, fields in ((f"{length}", {}), (f"{length}, window", {"sliding_window": run.args.window})):
            fresh = run.new(name, Kind("eagle3", fields))
            found.append((run.trained(fresh, 0.0, run.args.lr, steps=run.args.steps), length))
    return found


def ways(run: Comparison, draft: Draft, length: int) -> Iterator[Draft]:
    """A draft as it was trained, and with other settings that need no training."""
    from megatron_spec.config.rope import read_rope

    yield draft
    if draft.config.sliding_window is not None:
        return
    window = draft.config.replace(sliding_window=run.args.window)
    yield replace(draft, name=f"{draft.name}, window in decoding", config=window)
    factor = max(run.args.lengths) / length
    if factor > 1 and draft.config.rope.type == "default":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        rope = read_rope({"rope_theta": draft.config.rope.theta, "rope_scaling": scaling}, draft.name)
        yield replace(draft, name=f"{draft.name}, YaRN {factor:g}", config=draft.config.replace(rope=rope))


def measure(run: Comparison, draft: Draft, length: int, asked: list[list[int]], alone: list[list[int]]) -> None:
    """Acceptance of one draft at one length, as a line of the results."""
    from megatron_spec.decoding.engine import decode
    from megatron_spec.evaluation.acceptance import acceptance_stats

    name = f"{draft.name} at {length}"
    if run.results.has("context", name):
        return
    module = run.module(draft)
    run.base.capture(module.config.capture_layer_ids)
    found = decode(run.base, asked, run.decode.replace(cuda_graphs=False), run.stop_ids, draft=module)
    stats = acceptance_stats(found)
    run.results.add(
        "context", name=name, draft=draft.name, length=length, steps=draft.about["steps"],
        seconds=draft.about["seconds"], tokens=sum(map(len, asked)) / len(asked),
        identical=sum(g.tokens == a for g, a in zip(found, alone, strict=True)) / len(found),
        acceptance_length=stats.acceptance_length, ci95=stats.acceptance_length_ci95, few=asdict(stats),
        few_tokens=[sum(g.accepted_lengths) + len(g.accepted_lengths) for g in found],
        few_steps=[len(g.accepted_lengths) for g in found],
    )  # fmt: skip


def render(lines: Sequence[Line]) -> str:
    """The tables of a run: acceptance length, and the change against the draft of the same training, per length."""
    from benchmarks.acceptance_page import change, length_of, table

    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        if line["kind"] == "context":
            found.setdefault(line["draft"], {})[line["length"]] = line
    lengths = sorted({length for by in found.values() for length in by})
    absolute, changes = [], []
    for name, by in found.items():
        same = [f"{by[n]['identical']:.0%}" for n in lengths if n in by]
        absolute.append([name, *(length_of(by[n]["few"]) if n in by else "-" for n in lengths), " ".join(same)])
        full = found.get(name.split(",")[0], {})
        if by is not full:
            changes.append([name, *(change(by[n], full.get(n)) if n in by else "-" for n in lengths)])
    head = [f"{n} tokens" for n in lengths]
    return (
        table(["trained on texts of", *head, "same text"], absolute)
        + "\nChange against full attention, trained on the same texts:\n\n"
        + table(["trained on texts of", *head], changes)
    )


def main(args: argparse.Namespace) -> None:
    """Everything."""
    from benchmarks import comparison
    from megatron_spec.checkpoint.base_import import inspect_base
    from megatron_spec.data.chat import ChatEncoder
    from megatron_spec.decoding.engine import decode

    args.parts = ()
    for name in comparison.SETTINGS:  # those of the laboratory that count for nothing here
        setattr(args, name, getattr(args, name, None))
    kinds = [comparison.Kind("eagle3")]
    check(args, inspect_base(args.base).config.max_position_embeddings)
    run = comparison.Comparison(args, kinds, SETTINGS)
    encoder = ChatEncoder(run.tokenizer, run.stop_ids, vocab_size=run.ref.config.vocab_size)
    dialogues = Dialogues(run.conversations(), encoder)
    questions = {length: ask(run, dialogues, encoder, length) for length in args.lengths}
    drafts = [way for draft, length in train(run, dialogues) for way in ways(run, draft, length)]
    run.features = []
    for length, asked in questions.items():
        run.base.capture(())
        alone = decode(run.base, asked, run.decode.replace(cuda_graphs=False), run.stop_ids)
        for draft in drafts:
            measure(run, draft, length, asked, [g.tokens for g in alone])
        (run.output / "context.md").write_text(render(run.results.lines), encoding="utf-8")
    log.info("tables: %s", run.output / "context.md")


if __name__ == "__main__":
    cli.run(make_parser(), main)
