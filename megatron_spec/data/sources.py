"""Sources of conversations: local files (JSON, JSON lines, parquet) and datasets on the Hugging Face hub.

Everything is streamed: a source yields pieces of a few hundred records, each with the position after it, from which the
source can be reopened.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from megatron_spec.config import UserError, suggest

PIECE_BYTES, PIECE_RECORDS = 2**20, 500
Piece = tuple[int, list[tuple[str, Any]]]
"""(position after the piece, [(name of the record, its JSON line as bytes or its value)])."""
_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_UNREAD = (".csv", ".tsv", ".xlsx", ".arrow", ".zip", ".tar", ".tgz", ".zst", ".bz2", ".xz")
"""Endings of files that may hold conversations, and that are not read."""


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub and the part of it that holds conversations.

    Attributes:
        array_file: file with a JSON array, instead of a split. The datasets library would load it into memory
            completely, so the file is downloaded and read like a local one.
    """

    repository: str
    split: str = "train"
    array_file: str | None = None


HUB = {
    "daring-anteater": HubDataset("nvidia/Daring-Anteater"),
    "sharegpt": HubDataset(
        "anon8231489123/ShareGPT_Vicuna_unfiltered", array_file="ShareGPT_V3_unfiltered_cleaned_split.json"
    ),
    "ultrachat": HubDataset("HuggingFaceH4/ultrachat_200k", "train_sft"),
    "magpie": HubDataset("Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered"),
    "mt_bench": HubDataset("HuggingFaceH4/mt_bench_prompts"),
}
"""Datasets available by name; mt_bench holds only prompts."""


@dataclass(frozen=True)
class Source:
    """One input, read piece by piece.

    Attributes:
        path: local file, or None for a dataset on the hub.
        hub: the dataset on the hub, or None.
    """

    path: Path | None = None
    hub: HubDataset | None = None

    @property
    def name(self) -> str:
        """Name for messages and reports."""
        return str(self.path) if self.hub is None else self.hub.repository

    def identity(self) -> list[Any]:
        """What must not change for a run to resume: name, and size and modification time of a file."""
        if self.path is None:
            assert self.hub is not None
            return [self.hub.repository, self.hub.split, self.hub.array_file]
        status = self.path.stat()
        return [str(self.path.absolute()), status.st_size, status.st_mtime_ns]

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """Pieces from position `start` on. Raises UserError when the input cannot be read."""
        try:
            yield from self._pieces(start)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{self.name}: compressed data that is damaged or truncated ({error})") from None

    def _pieces(self, start: int) -> Iterator[Piece]:
        if self.path is None:
            assert self.hub is not None
            if self.hub.array_file is not None:
                return Source(_download(self.hub.repository, self.hub.array_file))._pieces(start)
            return _numbered(_hub_records(self.hub, start), start, self.hub.repository, "row")
        if self.path.name.endswith(".parquet"):
            return _numbered(_parquet_records(self.path, start), start, str(self.path), "row")
        with _open(self.path) as file:
            is_array = file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        if is_array:
            return _numbered(islice(_array_records(self.path), start, None), start, str(self.path), "entry")
        return _lines(self.path, start)


def find_sources(name: str, split: str | None = None) -> list[Source]:
    """The sources of one argument: a name of `HUB`, a file, a folder of files, or OWNER/NAME on the hub.

    Raises UserError when it is none of these.
    """
    if name in HUB and not Path(name).exists():
        known = HUB[name]
        if split and known.array_file:
            raise UserError(f"--split {split}: {name} is one file without splits; leave it out")
        return [Source(hub=replace(known, split=split or known.split))]
    path = Path(name)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIXES))
        if not files:
            raise UserError(f"{path} holds no file that ends with {', '.join(_SUFFIXES)}")
        if others := sorted(p.name for p in path.iterdir() if p.name.endswith(_UNREAD)):
            raise UserError(
                f"{path}: found {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}, expected files that end "
                f"with {', '.join(_SUFFIXES)}: convert or move the others"
            )
    elif path.is_file():
        if name.endswith(_UNREAD):
            raise UserError(f"{path}: expected a file that ends with {', '.join(_SUFFIXES)}: convert it")
        files = [path]
    elif name.count("/") == 1 and not name.endswith(_SUFFIXES) and not name.startswith((".", "/", "~")):
        return [Source(hub=HubDataset(name, split or "train"))]
    else:
        raise UserError(
            f"{name} does not exist: expected a file, a folder, OWNER/NAME on the Hugging Face hub, or one of "
            f"{', '.join(HUB)}{suggest(name, HUB)}"
        )
    return [Source(path=p) for p in files]


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, start: int) -> Iterator[Piece]:
    """Positions are bytes; lines before `start` are read again to count them."""
    number, size = 0, 0
    records: list[tuple[str, Any]] = []
    with _open(path) as file:
        position = 0
        for line in file:
            number += 1
            position += len(line)
            if position <= start:
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                records.append((f"{path} line {number}", line))
                size += len(line)
            if size >= PIECE_BYTES:
                yield position, records
                records, size = [], 0
    if records:
        yield position, records


def _numbered(values: Iterable[Any], start: int, name: str, word: str) -> Iterator[Piece]:
    records: list[tuple[str, Any]] = []
    number = start
    for value in values:
        records.append((f"{name} {word} {number}", value))
        number += 1
        if len(records) >= PIECE_RECORDS:
            yield number, records
            records = []
    if records:
        yield number, records


def _array_records(path: Path, chunk: int = 2**20) -> Iterator[Any]:
    """Entries of a JSON array, holding at most one of them and a chunk in memory."""
    decoder = json.JSONDecoder()
    with _open(path) as raw:
        decode = _decoder(path)
        text, position, at_end = "", 0, False

        def more() -> None:
            """Append another block to the unread text."""
            nonlocal text, position, at_end
            block = raw.read(max(chunk, len(text) - position))  # doubles, so a long entry is parsed few times
            at_end = not block
            text, position = text[position:] + decode(block, at_end), 0

        while "[" not in text:  # `Source.pieces` has checked that it exists
            more()
        position = text.index("[") + 1
        number = 0
        while True:
            while position < len(text) and text[position] in " \t\r\n,":
                position += 1
            if position == len(text) and not at_end:
                more()
                continue
            if text[position : position + 1] == "]":
                return
            try:
                value, position = decoder.raw_decode(text, position)
            except ValueError as error:
                cut = str(error).startswith(("Unterminated", "Expecting")) and len(text) - position < 2**28
                if at_end or not cut:
                    raise UserError(f"{path} entry {number}: malformed JSON ({error})") from None
                more()
                continue
            yield value
            number += 1


def _decoder(path: Path) -> Callable[[bytes, bool], str]:
    """Function that decodes the bytes of a file in pieces; a piece may end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def decode(block: bytes, final: bool) -> str:
        """Text of a block, which may end inside a character."""
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 ({error.reason})") from None

    return decode


def _parquet_records(path: Path, start: int) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow: pip install 'megatron-spec[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            seen = 0
            for batch in file.iter_batches(PIECE_RECORDS):
                if seen + len(batch) > start:
                    yield from batch.slice(max(0, start - seen)).to_pylist()
                seen += len(batch)
    except ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file ({error})") from None


def _download(repository: str, file: str) -> Path:
    """A file of a dataset in the local hub cache; an interrupted download resumes."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:
        raise UserError(
            f"{repository}, {file}: cannot be downloaded ({type(error).__name__}: {error}); without the hub, give a "
            "local file"
        ) from error


def _hub_records(dataset: HubDataset, start: int) -> Iterator[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{dataset.repository}: the hub needs the datasets library: pip install 'megatron-spec[data]'"
        ) from None
    try:
        rows = load_dataset(dataset.repository, split=dataset.split, streaming=True)
        yield from rows.skip(start) if start else rows
    except Exception as error:
        raise UserError(
            f"{dataset.repository}, split {dataset.split}: cannot be read ({type(error).__name__}: {error}); a rerun "
            "resumes where this one stopped"
        ) from error
