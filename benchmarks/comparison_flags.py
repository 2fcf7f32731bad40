"""Flags of the programs that compare drafts on one base (`comparison.Comparison`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_spec import cli
from megatron_spec.config import UserError


def check_sets(prompts: Sequence[str]) -> None:
    """Raise UserError for two question files of one name: figures are listed by it."""
    name, count = Counter(Path(p).stem for p in prompts).most_common(1)[0]
    if count > 1:
        raise UserError(f"--prompts: {count} files are called {name}, which names a set of questions: rename them")


def add_flags(
    p: cli.Parser, *, conversations: int, answer_tokens: int, questions: int, max_new_tokens: int, batch_size: int
) -> None:
    """Base, questions, training data, and how drafts train and decode; the arguments are defaults."""
    p.add_argument("--base", required=True, metavar="DIR", help="base model, Hugging Face folder")
    p.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="JSONL",
        help="question files; first turns are asked",
    )
    p.add_argument("--output", required=True, metavar="DIR")
    p.add_argument("--data", metavar="JSONL", help="conversations to train on (default: the base writes them)")
    numbers = {
        "conversations": (conversations, "to write"), "answer-tokens": (answer_tokens, "most tokens of one of these"),
        "questions": (questions, "of each file"), "draft-vocab-size": (8192, "of EAGLE-3"),
        "max-new-tokens": (max_new_tokens, "of an answer"), "max-draft-len": (4, "draft tokens of a step"),
        "batch-size": (batch_size, "answers decoded together"),
    }  # fmt: skip
    for name, (default, text) in numbers.items():
        p.add_argument(f"--{name}", type=cli.at_least_one, default=default, help=f"{text} (default: {default})")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--bf16", action="store_true")
