"""Turn conversation files of other tools into the JSON lines this package trains on.

    python tools/prepare_conversations.py in1.json in2.jsonl --output train.jsonl
    python tools/prepare_conversations.py in.jsonl --output train.jsonl --held-out test.jsonl --held-out-share 0.05
    python tools/prepare_conversations.py in.jsonl --output prompts.jsonl --prompts-only   # to be answered by the base

Reads JSON (a list) and JSON lines with `messages` or `conversations` under OpenAI's or ShareGPT's names. What cannot
be used is dropped and counted by reason; equal conversations are kept once. Ids come from the content, so they and the
split do not depend on the order or number of input files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_spec import cli, files
from megatron_spec.config import UserError


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("inputs", nargs="+", metavar="FILE", help="JSON or JSON lines")
    p.add_argument("--output", required=True, metavar="JSONL")
    p.add_argument("--held-out", metavar="JSONL", help="file for the held-out part")
    p.add_argument("--held-out-share", type=float, default=0.05, help="share held out (default: %(default)s)")
    p.add_argument("--prompts-only", action="store_true", help="cut behind the last user turn before the first answer")
    p.add_argument("--max-characters", type=int, default=0, metavar="N", help="drop longer ones (default: no limit)")
    return p


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of every record. Raises UserError when the file cannot be read as JSON or JSON lines."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason})") from None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}: malformed JSON ({error})") from None
        yield from ((f"{path} entry {i}", value) for i, value in enumerate(values))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path} line {number}", json.loads(line)
            except ValueError as error:
                raise UserError(f"{path} line {number}: malformed JSON ({error})") from None


def clean(record: Any, prompts_only: bool) -> tuple[list[dict[str, Any]], str]:
    """(messages, '') or ([], reason for dropping)."""
    from megatron_spec.data.chat import parse_conversation

    if isinstance(record, dict):
        for key in ("conversations", "messages"):
            if isinstance(record.get(key), list):  # many files carry empty system messages: they say nothing
                record = {**record, key: [m for m in record[key] if not _is_empty_system(m)]}
    try:
        messages = parse_conversation(record, "").messages
    except UserError as error:
        return [], str(error).split(": ", 1)[-1].split(" (did")[0].split(";")[0]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return [], "no user turn"
    if prompts_only:
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        asks = first > 0 and roles[first - 1] == "user"
        return (messages[:first], "") if asks else ([], "no user turn in front of the first answer")
    while messages and messages[-1]["role"] != "assistant":  # a question nobody answered
        messages = messages[:-1]
    return (messages, "") if messages else ([], "no assistant turn")


def _is_empty_system(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role", message.get("from")) != "system":
        return False
    content = message.get("content", message.get("value"))
    return content is None or (isinstance(content, str) and not content.strip())


def identifier(messages: list[dict[str, Any]]) -> str:
    """16 hexadecimal digits from the content."""
    canonical = json.dumps(messages, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_held_out(name: str, share: float) -> bool:
    """Decided by the id alone, so that a conversation never changes sides."""
    return int(name, 16) < share * 16**16


def prepare(args: argparse.Namespace) -> None:
    """Read, clean, write, report. Raises UserError for unreadable input or when nothing is left."""
    if not 0 < args.held_out_share < 1:
        raise UserError(f"--held-out-share {args.held_out_share}: expected a number between 0 and 1")
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    read = 0
    for path in args.inputs:
        for _, record in read_records(Path(path)):
            read += 1
            messages, reason = clean(record, args.prompts_only)
            name = identifier(messages)
            if not reason and args.max_characters and sum(len(m["content"]) for m in messages) > args.max_characters:
                reason = f"longer than {args.max_characters} characters"
            if not reason and name in kept:
                reason = "seen before"
            if reason:
                dropped[reason] += 1
                continue
            line: dict[str, Any] = {"conversation_id": name, "conversations": messages}
            if record.get("tools"):
                line["tools"] = record["tools"]
            kept[name] = json.dumps(line, ensure_ascii=False)
    report = "".join(f"\n  {count} x {reason}" for reason, count in dropped.most_common())
    if not kept:
        raise UserError(f"nothing usable among {read} conversations:{report}")
    share = args.held_out_share if args.held_out else 0.0
    parts = [(args.output, [line for name, line in kept.items() if not is_held_out(name, share)])]
    if args.held_out:
        parts.append((args.held_out, [line for name, line in kept.items() if is_held_out(name, share)]))
    for path, lines in parts:
        files.write_text(path, "".join(line + "\n" for line in lines))
        sys.stdout.write(f"{len(lines)} conversations in {path}\n")
    sys.stdout.write(f"{read} read, {dropped.total()} dropped{':' + report if dropped else ''}\n")


if __name__ == "__main__":
    cli.run(make_parser(), prepare)
