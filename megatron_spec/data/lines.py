"""The lines of a JSON lines file, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError

LONGEST_LINE = 2**26
"""Most bytes of a line, which bounds the text tokenised at once: a line is one conversation, not a corpus."""


def refuse_other_formats(path: Path | str) -> None:
    """Raise UserError if a file is in a format for tools/prepare_conversations.py: JSON array, gzip, parquet, Arrow."""
    with Path(path).open("rb") as file:
        start = file.read(4096)
    kind = ""
    if start.startswith(b"\x1f\x8b"):
        kind = "compressed with gzip"
    elif start.startswith(b"PAR1"):
        kind = "a parquet file"
    elif start.startswith((b"\xff\xff\xff\xff", b"ARROW1")):
        kind = "an Arrow file"
    elif start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[1:].lstrip()[:1]
        kind = "a JSON array" if first in (b"{", b"]", b"") else ""
    if kind:
        raise UserError(
            f"{path} is {kind}, expected one JSON object per line: python tools/prepare_conversations.py {path} "
            "--output PREPARED.jsonl converts it"
        )


def numbered_lines(path: Path | str, what: str = "conversation", gaps: bool = False) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of a JSON lines file; empty lines at its end are skipped.

    Args:
        what: name of a line's content, for messages.
        gaps: also skip empty lines inside the file.

    Raises UserError for a missing file, one that prepare_conversations.py must convert first, an empty line inside it,
    a line of more than `LONGEST_LINE` bytes, and a file without any line.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder, expected a file of {what}s in JSON lines: python tools/prepare_conversations.py "
            f"{path} --output PREPARED.jsonl makes one of the files in it"
        )
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: expected {what}s in JSON lines")
    refuse_other_formats(path)
    blank = found = number = 0
    with path.open("rb") as file:
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise UserError(
                    f"{path} line {number}: longer than {LONGEST_LINE // 2**20} MiB, expected one {what} per line"
                )
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                blank = blank or number
                continue
            if blank and not gaps:
                raise UserError(f"{path} line {blank}: empty line inside the file: remove it")
            found += 1
            yield number, line
    if not found:
        raise UserError(f"{path} contains no {what}s")


def load_line(raw: bytes, where: str) -> Any:
    """The JSON value of one line. Raises UserError with `where`."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason}): convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: malformed JSON ({error}): expected one JSON object per line") from None
