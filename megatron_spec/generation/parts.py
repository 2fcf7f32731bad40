"""The files of an answering run of the base: a part for every data-parallel rank, merged into the output at the end.

Memory holds the place of every line, not the lines.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from megatron_spec.generation.outputs import read_records, record_lines, rejected_path
from megatron_spec.generation.prompts import Prompt
from megatron_spec.runtime.files import replacing, write_text

log = logging.getLogger(__name__)


def parts(output: Path) -> list[Path]:
    """The parts beside an output."""
    found = output.parent.iterdir() if output.parent.is_dir() else ()
    return sorted(p for p in found if re.fullmatch(re.escape(output.name) + r"\.part\d+", p.name))


def known_lines(output: Path) -> Iterator[tuple[Path, int, bytes, dict[str, Any]]]:
    """(file, place, line, record) of the output and its parts; the last record of a conversation counts.

    Broken lines are skipped: their prompts are answered again.
    """
    for path in (output, *parts(output)):
        for begin, line, record in record_lines(path, skip_broken=True):
            yield path, begin, line, record


class _Line(NamedTuple):
    """Where a conversation is, and what is counted of it."""

    path: Path
    begin: int
    size: int
    kept: bool
    cut: bool
    has_ids: bool
    problem: str


def _copy(lines: Sequence[_Line], output: Path) -> None:
    with replacing(output, sum(line.size for line in lines)) as temporary, ExitStack() as stack:
        file = stack.enter_context(temporary.open("wb"))
        sources = {path: stack.enter_context(path.open("rb")) for path in {line.path for line in lines}}
        for line in lines:
            sources[line.path].seek(line.begin)
            file.write(sources[line.path].read(line.size))


def merge(output: Path, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Merge the parts into the output and write OUTPUT.rejected. Returns identifier -> reason of unanswered prompts."""
    rejected = rejected_path(output)
    known = {
        r["conversation_id"]: _Line(
            path, begin, len(line), bool(r["conversations"]), bool(r["truncated"]), "answer_ids" in r,
            r.get("problem", ""),
        )
        for path, begin, line, r in known_lines(output)
    }  # fmt: skip
    order = dict.fromkeys([p.identifier for p in prompts] + list(known))  # those of other prompts come last
    found = {i: known[i] for i in order if i in known}
    kept = [line for line in found.values() if line.kept]
    problems = {i: r["problem"] for i, r in read_records(rejected).items() if i not in known}
    problems.update({i: line.problem for i, line in found.items() if not line.kept})
    for identifier, line in found.items():
        if line.problem:
            log.warning("%s: %s", identifier, line.problem)
    if kept:
        _copy(kept, output)
    lines = [json.dumps({"conversation_id": i, "problem": why}, ensure_ascii=False) for i, why in problems.items()]
    if lines:
        write_text(rejected, "\n".join(lines) + "\n")
    else:
        rejected.unlink(missing_ok=True)
    for path in parts(output):
        path.unlink()
    cut = [line for line in kept if line.cut]
    log.info("%s: %d conversations, %d of them cut at the token limit", output, len(kept), len(cut))
    if early := sum(bool(line.problem) for line in cut):
        log.warning("%d of them were cut before their last question: a larger --max-new-tokens avoids this", early)
    if problems:
        log.warning("%d prompts got no answer: %s lists the reasons", len(problems), rejected)
    ids = sum(line.has_ids for line in kept)
    log.info("%d of %d lines keep token ids of their answers: tokenising their text differs", ids, len(kept))
    return problems
