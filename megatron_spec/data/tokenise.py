"""Tokenise a conversation file into a TokenStore by threads or processes; cached until file, tokenizer or template
change.

The store is in `FILE.tokens/KEY` beside the file (or under the given folder), where KEY is a hash of the file's
content, the tokenizer, its template and template arguments, the ids that end a turn, and the code that makes masks. It
may be removed at any time. Concurrent processes that need the same store wait for the first to build it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_spec.config import UserError
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import parse_line
from megatron_spec.data.lines import numbered_lines
from megatron_spec.data.store import FORMAT, Block, StoreWriter, TokenStore, runs_of
from megatron_spec.data.workers import ordered_map, tokeniser_threads, usable_cpus
from megatron_spec.runtime.files import names_in, read_json, sha256_of, write_json
from megatron_spec.runtime.folders import published_folder

log = logging.getLogger(__name__)

PIECE = 2**20
"""Bytes that a process gets at a time."""
PARALLEL_FROM = 64 * 2**20
"""Files below this many bytes are tokenised by threads of this process: starting others takes seconds."""
PER_PROCESS = 16 * 2**20
"""Bytes that are worth starting a process."""

CODE = ("chat.py", "conversations.py", "lines.py", "offsets.py", "recorded.py", "template.py")
"""Source files that determine tokens and masks."""

FAULTS = {
    "shortened": "have a beginning that the chat template leaves out (reasoning, or text that it cuts)",
    "prompted_differently": "do not begin as the chat template's generation prompt does (a prefix such as <think>)",
}
"""Count in `Sample` -> description of such answers."""

REMEMBER_FROM = 2**28
"""Bytes from which the hash of a file is cached on disk, because every rank of a run needs it."""


def content_hash(path: Path, cache: Path | str | None = None) -> str:
    """SHA-256 of a file. For a large one it is cached beside its tokens until size or modification time change."""
    status = path.stat()
    if status.st_size < REMEMBER_FROM:
        return sha256_of(path)
    about = {"path": str(path.absolute()), "size": status.st_size, "changed_ns": status.st_mtime_ns}
    parent = _cache_folder(path, cache)
    known = parent / f".{path.name}.content.json"
    try:
        with _lock(parent, "content"):
            found = read_json(known) if known.is_file() else {}
            if any(found.get(name) != value for name, value in about.items()):
                found = {**about, "sha256": sha256_of(path)}
                write_json(known, found)
            return str(found["sha256"])
    except OSError:  # not writable: `open_tokens` reports it if needed
        return sha256_of(path)


def tokenizer_hash(tokenizer: Any) -> str:
    """Identity of a fast tokenizer and its chat template."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    template = {"template": tokenizer.chat_template, "special": tokenizer.special_tokens_map}
    digest.update(json.dumps(template, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def open_tokens(
    path: Path | str,
    tokenizer: Any,
    stop_token_ids: Collection[int] = (),
    cache: Path | str | None = None,
    workers: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TokenStore:
    """The tokens of a conversation file, from the cache if it has them.

    Args:
        stop_token_ids: see `ChatEncoder`.
        cache: folder for stores; default: `FILE.tokens` beside the file, or ~/.cache if that is not writable.
        workers: processes; default: up to as many as processors for large files, threads of this one for small ones.
        template_kwargs: see `ChatTemplate`.

    Raises UserError like `numbered_lines`, `parse_line` and `ChatEncoder`, and if the cache cannot be written.
    """
    path = Path(path)
    if not path.is_file():
        next(numbered_lines(path))  # raises the error
    # Refuses an unusable tokenizer before any work.
    encoder = ChatEncoder(tokenizer, stop_token_ids, template_kwargs=template_kwargs)
    about = {
        "data": content_hash(path, cache),
        "tokenizer": tokenizer_hash(tokenizer),
        "stop_token_ids": sorted(stop_token_ids),
        "chat_template_kwargs": encoder.template.kwargs,
        "code": [sha256_of(Path(__file__).with_name(name)) for name in CODE],
    }
    key = hashlib.sha256(json.dumps([FORMAT, about], sort_keys=True).encode()).hexdigest()[:16]
    parent = _cache_folder(path, cache)
    folder = parent / key
    if not (folder / "meta.json").is_file():
        if workers is None:
            size = path.stat().st_size
            workers = min(usable_cpus(), size // PER_PROCESS) if size >= PARALLEL_FROM else 0
        try:
            with _lock(parent, key):
                # Another machine may have written it while this one waited.
                if key not in names_in(parent) or not (folder / "meta.json").is_file():
                    _build(_Job(path, encoder, tuple(stop_token_ids), workers), folder, about)
        except OSError as error:
            raise UserError(f"{folder}: tokens cannot be written ({error}): give another --data-cache-path") from error
    return TokenStore(folder)


def _cache_folder(path: Path, cache: Path | str | None) -> Path:
    if cache is not None:
        return Path(cache)
    beside = path.with_name(f"{path.name}.tokens")
    if os.access(beside if beside.exists() else path.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_spec" / "tokens"


@contextmanager
def _lock(parent: Path, key: str) -> Iterator[None]:
    """One builder at a time on this machine, and across machines if the file system supports it."""
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / f".{key}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # two may build: the second result replaces the first
            log.warning("%s: file locks do not work here (%s)", parent, error)
        yield
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Job:
    path: Path
    encoder: ChatEncoder
    stop_token_ids: tuple[int, ...]
    workers: int


def _build(job: _Job, folder: Path, about: dict[str, Any]) -> None:
    start, size = time.monotonic(), job.path.stat().st_size
    threads = tokeniser_threads() if job.workers < 2 else 1
    args = (job.encoder.tokenizer, job.stop_token_ids, str(job.path), job.encoder.template.kwargs, threads)
    faults: Counter[str] = Counter()
    first: dict[str, int] = {}
    # `size` bytes are enough space: a token stands for several bytes of text.
    with published_folder(folder, True, "give another --data-cache-path", size, unless="meta.json") as temporary:
        writer = StoreWriter(temporary, len(job.encoder.tokenizer))
        done = logged = tokens = 0
        try:
            for block, read, found in ordered_map(_PieceEncoder, args, _pieces(job.path), job.workers):
                writer.append(block)
                for fault, line, count in found:
                    faults[fault] += count
                    first.setdefault(fault, line)
                done, tokens = done + read, tokens + len(block.tokens)
                if done - logged >= max(size // 20, 2**26):
                    logged, seconds = done, time.monotonic() - start
                    log.info("tokenised %.0f %% of %s, %.0f tokens/s", 100 * done / size, job.path, tokens / seconds)
            writer.finish({**about, "faults": {name: [count, first[name]] for name, count in faults.items()}})
        finally:
            writer.abandon()
    seconds = time.monotonic() - start
    log.info(
        "tokenised %s: %d tokens in %.1f s (%.0f tokens/s; %s)", job.path, tokens, seconds,
        tokens / max(seconds, 1e-9), f"{job.workers} processes" if job.workers > 1 else f"{threads} threads",
    )  # fmt: skip


def _pieces(path: Path) -> Iterator[list[tuple[int, bytes]]]:
    piece: list[tuple[int, bytes]] = []
    size = 0
    for number, line in numbered_lines(path):
        piece.append((number, line))
        size += len(line)
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


class _PieceEncoder:
    """Lines of a file -> (their samples, bytes read, [(fault, line, answers)])."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: tuple[int, ...], path: str, template_kwargs: dict[str, Any], threads: int
    ) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads but `threads`
        self.encoder = ChatEncoder(tokenizer, stop_token_ids, template_kwargs=template_kwargs, threads=threads)
        self.path = path

    def __call__(self, piece: list[tuple[int, bytes]]) -> tuple[Block, int, list[tuple[str, int, int]]]:
        parsed = [parse_line(line, f"{self.path} line {number}") for number, line in piece]
        found = self.encoder.encode_all(parsed)
        samples = [sample for samples in found for sample in samples]
        lines = [number for (number, _), samples in zip(piece, found, strict=True) for _ in samples]
        runs = [runs_of(sample.turns.numpy()) for sample in samples]
        block = Block(
            np.concatenate([sample.tokens.numpy() for sample in samples]).astype(np.uint32),
            np.array([len(sample) for sample in samples], dtype=np.int32),
            np.array(lines, dtype=np.int32),
            np.concatenate(runs),
            np.array([len(run) for run in runs], dtype=np.int32),
            np.concatenate([sample.rejected.numpy() for sample in samples]).astype(np.int32),
            np.array([len(sample.rejected) for sample in samples], dtype=np.int32),
        )
        faults = [
            (fault, line, count)
            for sample, line in zip(samples, lines, strict=True)
            for fault in FAULTS
            if (count := getattr(sample, fault))
        ]
        return block, sum(len(line) for _, line in piece), faults
