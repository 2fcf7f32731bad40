"""The files of a generating run, and their lines: what an earlier run wrote is not made again.

OUTPUT            a line per record
OUTPUT.rejected   prompts without an answer, and why
OUTPUT.meta.json  what the records depend on; a rerun must agree
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError

log = logging.getLogger(__name__)


def rejected_path(output: Path) -> Path:
    """OUTPUT.rejected."""
    return output.with_name(f"{output.name}.rejected")


def meta_path(output: Path) -> Path:
    """OUTPUT.meta.json."""
    return output.with_name(f"{output.name}.meta.json")


ANOTHER = "use another output file, or remove this one"


def require_recorded(output: Path, files: Iterable[Path]) -> None:
    """Raise UserError if one of the files has a content, and no OUTPUT.meta.json says that such a run wrote it."""
    left = [p for p in files if p.is_file() and p.stat().st_size]
    if left and not meta_path(output).is_file():
        raise UserError(
            f"{left[0]} already exists, but {meta_path(output).name}, which records how its conversations were made, "
            f"is missing: {ANOTHER}"
        )


def record_lines(path: Path, skip_broken: bool = False) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(place in the file, line, its record); nothing without a file. A half-written last line is not read.

    Args:
        skip_broken: skip other lines that are not records of a conversation, with a warning; else they are UserErrors.
    """
    end = 0
    with path.open("rb") if path.is_file() else BytesIO() as file:
        for number, line in enumerate(file, start=1):
            begin, end = end, end + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                hash(record["conversation_id"])
            except (ValueError, KeyError, TypeError, RecursionError):
                problem = f"{path} line {number} is not a conversation record"
                if not skip_broken:
                    raise UserError(f"{problem}: use another output file") from None
                log.warning("%s: skipped", problem)
                continue
            yield begin, line, record


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records of a file by conversation_id; broken lines are skipped."""
    return {record["conversation_id"]: record for _, _, record in record_lines(path, skip_broken=True)}
