"""Clean conversation files of other tools in several processes and write JSON lines to train on, without duplicates.

    OUTPUT.work/lines.jsonl, ids.bin   lines cleaned so far, and the id of each (uint64)
    OUTPUT.work/state.json             position in the sources, and counts: a killed run resumes from there
    OUTPUT, HELD_OUT                   written at the end, without lines whose id was seen before

Memory holds a few pieces of the input and, at the end, the ids: 8 bytes per conversation, and twice that to sort them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_spec.config import UserError
from megatron_spec.data.cleaning import CleanOptions, clean, is_held_out
from megatron_spec.data.lines import load_line
from megatron_spec.data.sources import Piece, Source
from megatron_spec.data.workers import ordered_map, usable_cpus
from megatron_spec.runtime import lock
from megatron_spec.runtime.files import object_in, read_json, replacing, require_own, write_json, writing

log = logging.getLogger(__name__)

PARALLEL_FROM = 32 * 2**20
"""Bytes of input above which several processes are used by default."""
DUPLICATE = "seen before"
MOST_REASONS, OTHER = 100, "other reasons"
"""Every record of a file may have a different reason (names as roles): this bounds the memory they take."""


@dataclass(frozen=True)
class Report:
    """Result of cleaning the sources.

    Attributes:
        read: number of records.
        written: file -> number of lines.
        dropped, repairs: reason -> records.
        examples: reason -> the first record that was dropped for it, as 'FILE line N'.
    """

    read: int
    written: dict[str, int]
    dropped: Counter[str]
    repairs: Counter[str]
    examples: dict[str, str]


@dataclass(frozen=True)
class _Cleaned:
    """Result of cleaning one piece; the next one begins at `place`."""

    place: int
    lines: bytes
    ids: NDArray[Any]
    read: int
    dropped: Counter[str]
    repairs: Counter[str]
    examples: dict[str, str]


class _PieceCleaner:
    """Cleans the records of a piece."""

    def __init__(self, options: CleanOptions) -> None:
        self.options = options

    def __call__(self, piece: Piece) -> _Cleaned:
        place, records = piece
        lines: list[str] = []
        ids: list[int] = []
        dropped: Counter[str] = Counter()
        repairs: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for where, value in records:
            result = clean(_value(value, where), self.options)
            repairs.update(result.repairs)
            if result.line is None:
                dropped[result.reason] += 1
                examples.setdefault(result.reason, where)
                continue
            ids.append(int(result.line["conversation_id"], 16))
            lines.append(json.dumps(result.line, ensure_ascii=False) + "\n")
        text = "".join(lines).encode("utf-8")
        return _Cleaned(place, text, np.array(ids, np.uint64), len(records), dropped, +repairs, examples)


def _value(value: Any, where: str) -> Any:
    if not isinstance(value, bytes):
        return value
    return load_line(value, where)


class _Work:
    """The folder of an unfinished run."""

    def __init__(self, output: Path, request: dict[str, Any]) -> None:
        self.folder = output.with_name(f"{output.name}.work")
        path = self.folder / "state.json"
        self.state: dict[str, Any] = {
            "request": request, "source": 0, "place": 0, "lines": 0, "ids": 0, "read": 0, "dropped": {}, "repairs": {},
            "examples": {},
        }  # fmt: skip
        if path.is_file():
            found = read_json(path)
            if found["request"] != json.loads(json.dumps(request)):
                raise UserError(
                    f"{self.folder} belongs to an unfinished run over other sources or with other options: finish that "
                    "one, or remove the folder"
                )
            self.state.update(found)
            log.info("resuming after %d records in %s", found["read"], self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def open(self, stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
        """The files (lines, ids), truncated to what state.json records."""
        opened = []
        for name, key in (("lines.jsonl", "lines"), ("ids.bin", "ids")):
            path = self.folder / name
            if self.state[key] > (path.stat().st_size if path.exists() else 0):
                raise UserError(f"{path} is shorter than it was: remove {self.folder} to restart")
            file = stack.enter_context(path.open("r+b" if path.exists() else "w+b"))
            file.truncate(self.state[key])
            file.seek(self.state[key])
            opened.append(file)
        return opened[0], opened[1]

    def save(self) -> None:
        """Write the state atomically."""
        write_json(self.folder / "state.json", self.state)


def prepare(
    sources: Sequence[Source],
    output: Path,
    options: CleanOptions,
    held_out: Path | None = None,
    share: float = 0.05,
    workers: int | None = None,
) -> Report:
    """Read, clean and write. A rerun resumes a killed run; after a finished one it starts over.

    Args:
        held_out: file for the share of the conversations to hold out of training, chosen by id.
        workers: processes; default: all processors for large inputs.

    Raises UserError for unreadable input, for an output that is an input or that another run writes, or when nothing
    usable is left.
    """
    _check_outputs(sources, [path for path in (output, held_out) if path])
    with lock.exclusive(output, file=True):
        return _prepare(sources, output, options, held_out, share, workers)


def _prepare(
    sources: Sequence[Source], output: Path, options: CleanOptions, held_out: Path | None, share: float,
    workers: int | None,
) -> Report:  # fmt: skip
    request = {"sources": [s.identity() for s in sources], "options": asdict(options)}
    work = _Work(output, request)
    if workers is None:
        size = sum(s.path.stat().st_size if s.path else PARALLEL_FROM for s in sources)
        workers = usable_cpus() if size >= PARALLEL_FROM else 0
    with writing(work.folder):
        _read(sources, work, options, workers)
    state = work.state
    dropped = Counter(state["dropped"])
    if state["lines"] == 0:
        shutil.rmtree(work.folder)
        if not state["read"]:
            raise UserError(f"{', '.join(source.name for source in sources)}: empty, no record was found")
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in dropped.most_common())
        raise UserError(f"nothing usable among {state['read']} conversations:{reasons}")
    with writing(output):
        written, duplicates = _distribute(work.folder, output, held_out, share if held_out else 0.0)
    if duplicates:
        dropped[DUPLICATE] += duplicates
    shutil.rmtree(work.folder)
    return Report(state["read"], written, dropped, Counter(state["repairs"]), state["examples"])


def _check_outputs(sources: Sequence[Source], outputs: Sequence[Path]) -> None:
    inputs = {source.path.resolve() for source in sources if source.path}
    for path in outputs:
        if path.resolve() in inputs:
            raise UserError(f"{path} is one of the sources: write to another file")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UserError(f"{outputs[0]}: both parts would be written to it: give --held-out another file")
    for path, flag in zip(outputs, ("--output", "--held-out"), strict=False):
        require_own(path, _is_prepared, "a result of prepare_conversations.py", flag)


def _is_prepared(path: Path) -> bool:
    """True for a file that an earlier run wrote; answers (generate.py) have their settings beside them."""
    name = str(object_in(path, lines=True).get("conversation_id"))
    return bool(re.fullmatch("[0-9a-f]{16}", name)) and not path.with_name(f"{path.name}.meta.json").exists()


def _count(known: dict[str, int], more: Counter[str]) -> None:
    for reason, count in more.items():
        key = reason if reason in known or len(known) < MOST_REASONS else OTHER
        known[key] = known.get(key, 0) + count


def _read(sources: Sequence[Source], work: _Work, options: CleanOptions, workers: int) -> None:
    state = work.state
    logged = state["lines"]
    with ExitStack() as stack:
        lines, ids = work.open(stack)
        for number in range(state["source"], len(sources)):
            pieces = sources[number].pieces(state["place"])
            for found in ordered_map(_PieceCleaner, (options,), pieces, workers):
                lines.write(found.lines)
                ids.write(found.ids.tobytes())
                lines.flush()
                ids.flush()
                _count(state["dropped"], found.dropped)
                _count(state["repairs"], found.repairs)
                for reason in found.examples.keys() & state["dropped"].keys():
                    state["examples"].setdefault(reason, found.examples[reason])
                state.update(place=found.place, lines=lines.tell(), ids=ids.tell(), read=state["read"] + found.read)
                work.save()
                if state["lines"] - logged >= 2**26:
                    logged = state["lines"]
                    log.info("%s: %d records read, %.0f MB kept", sources[number].name, state["read"], logged / 2**20)
            state.update(source=number + 1, place=0)
            work.save()


def _first_of_each(ids: NDArray[Any]) -> NDArray[Any]:
    """bool [N]: True at the first occurrence of each id."""
    order = np.argsort(ids, kind="stable")
    keep = np.ones(len(ids), dtype=bool)
    keep[order[1:][ids[order[1:]] == ids[order[:-1]]]] = False
    return keep


def _distribute(folder: Path, output: Path, held_out: Path | None, share: float) -> tuple[dict[str, int], int]:
    """({file: number of lines}, number of duplicates left out)."""
    ids = np.fromfile(folder / "ids.bin", dtype=np.uint64)
    keep = _first_of_each(ids)
    targets = [output] + ([held_out] if held_out else [])
    temporaries = [folder / f"output{i}" for i in range(len(targets))]
    counts = [0] * len(targets)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in temporaries]
        lines = stack.enter_context((folder / "lines.jsonl").open("rb"))
        for line, name, kept in zip(lines, ids, keep, strict=True):
            if kept:
                side = int(is_held_out(f"{int(name):016x}", share))
                files[side].write(line)
                counts[side] += 1
    for temporary, target in zip(temporaries, targets, strict=True):
        with replacing(target) as part:
            shutil.copyfile(temporary, part)
    return {str(t): n for t, n in zip(targets, counts, strict=True)}, int((~keep).sum())
