"""Sources of conversations: local files (JSON, JSON lines, parquet, Arrow) and datasets on the Hugging Face hub.

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
from megatron_spec.runtime.files import read_object

PIECE_BYTES, PIECE_RECORDS = 2**20, 500
Piece = tuple[int, list[tuple[str, Any]]]
"""(position after the piece, [(name of the record, its JSON line as bytes or its value)])."""
_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz", ".json.gz")
_UNREAD = (".csv", ".tsv", ".xlsx", ".zip", ".tar", ".tgz", ".zst", ".bz2", ".xz")
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
        split: split of a folder of `DatasetDict.save_to_disk` that the file is from, or None.
    """

    path: Path | None = None
    hub: HubDataset | None = None
    split: str | None = None

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
        if self.path.suffix in (".parquet", ".arrow"):
            return _numbered(_table_records(self.path, start), start, str(self.path), "row")
        with _open(self.path) as file:
            is_array = file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        if is_array:
            return _numbered(islice(_array_records(self.path), start, None), start, str(self.path), "entry")
        return _lines(self.path, start)


def find_sources(name: str, split: str | None = None) -> list[Source]:
    """The sources of one argument: a name of `HUB`, a file, a folder, or OWNER/NAME on the hub.

    A folder holds files, or is one of `save_to_disk`.

    Raises UserError when it is none of these.
    """
    if name in HUB and not Path(name).exists():
        known = HUB[name]
        if split and known.array_file:
            raise UserError(f"--split {split}: {name} is one file without splits; leave it out")
        return [Source(hub=replace(known, split=split or known.split))]
    path = Path(name)
    if (path / "dataset_dict.json").is_file():
        part = _split_folder(path, split or "train")
        return [Source(path=p, split=part.name) for p in _saved_files(part)]
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return [Source(path=p) for p in _saved_files(path)]
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


def _split_folder(path: Path, split: str) -> Path:
    """Folder of one split of `DatasetDict.save_to_disk`."""
    known = read_object(path / "dataset_dict.json").get("splits") or []
    if split not in known:
        raise UserError(f"{path}: no split {split!r}, choose one of {', '.join(known)} with --split")
    return path / split


def _saved_files(path: Path) -> list[Path]:
    """The Arrow files of `Dataset.save_to_disk`, in their order."""
    listed = read_object(path / "state.json").get("_data_files")
    names = [str(entry.get("filename")) for entry in listed or [] if isinstance(entry, dict)]
    if not names or not all((path / name).is_file() for name in names):
        raise UserError(f"{path}: state.json names {names}, which are not all there: save the dataset again")
    return [path / name for name in names]


def _table_records(path: Path, start: int) -> Iterator[Any]:
    """Rows of a parquet or Arrow file."""
    kind = path.suffix[1:]
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise UserError(f"{path}: {kind} needs pyarrow: pip install 'megatron-spec[data]'") from None
    try:
        seen = 0
        for batch in _batches(path):
            for first in range(max(0, start - seen), len(batch), PIECE_RECORDS):
                yield from map(_without_padding, batch.slice(first, PIECE_RECORDS).to_pylist())
            seen += len(batch)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable {kind} file ({error})") from None


def _batches(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowInvalid, ipc, memory_map, parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(PIECE_RECORDS)
        return
    with memory_map(str(path)) as data:
        try:
            yield from ipc.open_stream(data)  # as the datasets library writes it
        except ArrowInvalid:
            file = ipc.open_file(data)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))


def _without_padding(value: Any) -> Any:
    """A row without null fields: in a column of objects each has the fields of all, so tools differ in nulls alone."""
    if isinstance(value, dict):
        return {key: _without_padding(item) for key, item in value.items() if item is not None}
    return [_without_padding(item) for item in value] if isinstance(value, list) else value


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
        yield from map(_without_padding, rows.skip(start) if start else rows)
    except Exception as error:
        raise UserError(
            f"{dataset.repository}, split {dataset.split}: cannot be read ({type(error).__name__}: {error}); a rerun "
            "resumes where this one stopped"
        ) from error
