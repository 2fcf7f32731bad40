"""Convert question files to the input of benchmark clients: GenAI-Perf or trtllm-bench.

    python tools/convert_questions.py question.jsonl --output prompts.jsonl
    python tools/convert_questions.py question.jsonl --output dataset.json --format trtllm-bench --output-tokens 256

A question file has lines with "turns", such as {"question_id": 81, "category": "writing", "turns": ["...", "..."]};
conversations are accepted too. genai-perf: lines {"text_input": ...} for `genai-perf profile --input-file` (--field
text for releases with that name). trtllm-bench: lines {"task_id", "prompt", "output_tokens"} for --dataset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_spec import cli
from megatron_spec.config import UserError
from megatron_spec.runtime.files import object_in, require_own, write_text


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("data", metavar="JSONL", help="question file, or conversations")
    p.add_argument("--output", metavar="FILE", help="default: standard output")
    p.add_argument(
        "--format", choices=["genai-perf", "trtllm-bench"], default="genai-perf", help="client (default: genai-perf)"
    )
    p.add_argument(
        "--field", choices=["text_input", "text"], help="genai-perf: name of the field (default: text_input)"
    )
    p.add_argument("--output-tokens", type=cli.at_least_one, help="trtllm-bench: tokens per answer (default: 128)")
    p.add_argument(
        "--turns", choices=["first", "all"], default="first", help="turns of a question to use (default: first)"
    )
    p.add_argument("--category", help="use only questions of this category")
    p.add_argument("--limit", type=cli.at_least_one, metavar="N", help="write only the first N lines")
    p.add_argument("--chat-template", metavar="DIR", help="render with the chat template of this tokenizer folder")
    return p


def questions(args: argparse.Namespace) -> Iterator[str]:
    """The selected texts, in order."""
    from megatron_spec.generation.prompts import read_prompts

    prompts = [p for p in read_prompts(args.data) if args.category in (None, p.category)]
    if not prompts:
        raise UserError(f"{args.data} has no question of category {args.category!r}")
    render = renderer(args.chat_template) if args.chat_template else None
    for prompt in prompts:
        system = [m for m in prompt.rounds[0] if m["role"] != "user"]
        for i, messages in enumerate(prompt.rounds if args.turns == "all" else prompt.rounds[:1]):
            asked = [*(system if i else ()), *messages]
            if render is not None:
                yield render(asked, prompt)
            elif len(asked) > 1:
                raise UserError(
                    f"{prompt.where}: found messages of {', '.join(m['role'] for m in asked)}, expected one question, "
                    "as the output has one text: give --chat-template to render them"
                )
            else:
                yield str(asked[0]["content"])


def renderer(folder: str) -> Any:
    """Function that renders messages with the chat template, up to the answer."""
    from megatron_spec.data.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(folder)
    return lambda messages, prompt: tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, tools=prompt.tools, **prompt.template_kwargs
    )


def lines(args: argparse.Namespace) -> Iterator[str]:
    """JSON lines of the output. Raises UserError for a flag of the other format."""
    bench = args.format == "trtllm-bench"
    if args.field and bench:
        raise UserError("--field is an option of --format genai-perf: leave it out")
    if args.output_tokens and not bench:
        raise UserError("--output-tokens is an option of --format trtllm-bench: leave it out")
    for number, text in enumerate(questions(args)):
        if args.limit is not None and number >= args.limit:
            return
        record: dict[str, Any] = {args.field or "text_input": text}
        if bench:
            record = {"task_id": number, "prompt": text, "output_tokens": args.output_tokens or 128}
        yield json.dumps(record, ensure_ascii=False) + "\n"


def is_converted(path: Path) -> bool:
    """True for a file of `lines`."""
    return tuple(object_in(path, lines=True)) in (("text_input",), ("text",), ("task_id", "prompt", "output_tokens"))


def main(args: argparse.Namespace) -> None:
    """Read, convert, write. Raises UserError for invalid input."""
    if args.output and Path(args.output).resolve() == Path(args.data).resolve():
        raise UserError(f"--output {args.output} is also the question file: it would be overwritten")
    if args.output:
        require_own(args.output, is_converted, "a result of convert_questions.py")
    text = "".join(lines(args))
    if args.output:
        write_text(args.output, text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    cli.run(make_parser(), main)
