"""Atomic writes (a temporary name, then one rename), and errors that name the file.

Everything the package writes goes through `writing`, `replacing` or `folders.published_folder`: a full disk or a folder
without write permission is one `UserError` with path and size, and leaves no partial file.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.temporary import final_path, leftovers, temporary_name

JSON_LIMIT = 2**28
"""Maximum bytes of a JSON file of a model; a larger file must be something else."""

_REFUSED = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EIO,
    errno.EINVAL, errno.EOPNOTSUPP, errno.EBUSY, errno.EXDEV, errno.ENOTEMPTY,
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = (
    "no space left", "disk quota exceeded",
    "pytorchstreamwriter failed writing", "basic_ios::clear: iostream error", "unexpected pos ",  # torch.save
)  # fmt: skip


# ---- writing


def human_size(size: float) -> str:
    """A number of bytes as text: '1.5 GiB'."""
    if size < 1024:
        return f"{size:.0f} bytes"
    power = min(int(math.log(size, 1024)), 4)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def free_space(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(path: Path | str, size: int, hint: str = "") -> None:
    """Raise UserError if fewer than `size` bytes are free on the file system of `path`; called before writing.

    Args:
        hint: what to do, instead of freeing space.
    """
    path = Path(path).absolute()
    free = free_space(path)
    if free < size:
        raise UserError(_full(path, size, free, *([hint] if hint else [])))


def _full(path: Path, size: int | None, free: int, hint: str = "make room, then start again") -> str:
    needed = f"about {human_size(size)} are needed, " if size else ""
    return f"{path} cannot be written: no space left on the disk ({needed}{human_size(free)} free): {hint}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, including those from other processes (megatron-core's writers)."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        failures = getattr(seen, "failures", None)  # torch's CheckpointException: {rank: (error, traceback)}
        for failure in failures.values() if isinstance(failures, Mapping) else ():
            yield from _causes(failure[0] if isinstance(failure, tuple) else failure)
        seen = seen.__cause__ or seen.__context__


def write_error(
    path: Path | str, error: BaseException, size: int | None = None, hint: str = ""
) -> UserError | None:  # fmt: skip
    """UserError for a failed write of `path`; None if the cause was not an operating system error.

    Args:
        size: bytes to be written.
        hint: what to do, instead of freeing space or choosing another place.
    """
    path = final_path(path)
    for cause in _causes(error):
        code = re.search(r"\(os error (\d+)\)", str(cause))  # safetensors
        number = cause.errno if isinstance(cause, OSError) else int(code[1]) if code else None
        if number == errno.EFBIG or "file too large" in str(cause).lower():
            limit = "larger than a file may be here (see ulimit -f)"
            return UserError(f"{path} cannot be written: {limit}: {hint or 'raise the limit'}")
        if number in _FULL or any(text in str(cause).lower() for text in _FULL_TEXTS):
            return UserError(_full(path, size, free_space(path), *([hint] if hint else [])))
        name = getattr(cause, "filename", None)
        where = final_path(os.fsdecode(name)) if isinstance(name, (str, bytes)) else path
        if number in _REFUSED or (number == errno.ENOENT and where.is_relative_to(path.parent)):
            return UserError(f"{where} cannot be written ({os.strerror(number)}): {hint or 'choose a writable folder'}")
    return None


@contextmanager
def writing(path: Path | str, size: int | None = None, hint: str = "") -> Iterator[None]:
    """Context that writes `path`: operating system errors become a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and not hasattr(e, "failures"):  # CheckpointException is a BaseException
            raise
        error = write_error(path, e, size, hint)
        if error is None:
            raise
        raise error from e


def rename(source: Path | str, target: Path | str) -> None:
    """Move a written file or folder to its final name; the only such place.

    Contents reach the disk before the name does: after a power failure, a complete name would hold zeros.
    """
    source = Path(source)
    for path in source.rglob("*") if source.is_dir() else [source]:
        if path.is_file():
            _sync(path)
    os.replace(source, target)
    with suppress(OSError):  # not every file system syncs folders
        _sync(Path(target).parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP):  # a file system without it
            raise
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path | str, size: int | None = None) -> Iterator[Path]:
    """A temporary name beside `path`; the file written there replaces `path` if the block succeeds.

    Otherwise it is removed. Temporary files of killed processes are removed, too.
    """
    path = Path(path)
    temporary = temporary_name(path)
    with writing(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in leftovers(path):
            leftover.unlink(missing_ok=True)
        try:
            yield temporary
            rename(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Replace a file atomically. Raises UserError if it cannot be written."""
    with replacing(path, len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Replace a file by indented JSON, atomically; NaN and infinity, which JSON lacks, become null.

    Raises UserError if it cannot be written.
    """
    write_text(path, json.dumps(_in_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _in_json(value: Any) -> Any:
    """The value with null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_own(path: Path | str, own: Callable[[Path], bool], kind: str, flag: str = "--output") -> None:
    """Raise UserError for an output that is no file, or a file of another kind, before a run that would replace it.

    Args:
        own: True for a file as this run writes it.
        kind: what `own` looks for, for the message.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{flag} {path} is {'a folder' if path.is_dir() else 'no regular file'}, expected a file")
    if path.is_file() and path.stat().st_size and not own(path):
        raise UserError(
            f"{flag} {path} exists and is not {kind}: it would be overwritten; give another file, or remove this one"
        )


def append_text(path: Path | str, text: str) -> None:
    """Append complete lines to a file. If the disk is full, truncates the file again and raises UserError."""
    data = text.encode("utf-8")
    with writing(path, len(data)), open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def drop_half_line(path: Path) -> None:
    """Cut off a half-written line that a killed run left at the end."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        begin = end = file.seek(0, os.SEEK_END)
        while begin > 0:  # from its end: the file may be larger than memory
            begin = max(begin - 2**20, 0)
            file.seek(begin)
            if whole := file.read(min(2**20, end - begin)).rfind(b"\n") + 1:
                begin += whole
                break
        if begin < end:
            file.truncate(begin)


# ---- reading


def names_in(folder: Path) -> set[str]:
    """Names of what is in a folder, from a new listing of it; none for a folder that is not there.

    A network file system may remember for a minute that a file was not there, but lists a changed folder anew: the way
    to look for what another machine has written.
    """
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def read_text(path: Path | str, kind: str = "text") -> str:
    """Contents of a small file. Raises UserError naming it if it is missing, unreadable, huge or not text.

    Args:
        kind: kind of text, for the message.
    """
    path = Path(path)
    require_small(path, kind)
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a byte order mark
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not valid {kind} ({e}): it may be damaged; copy it again") from None


def require_small(path: Path, kind: str) -> None:
    """Raise UserError for a file larger than any of its kind, rather than run out of memory."""
    if path.is_file() and path.stat().st_size > JSON_LIMIT:
        raise UserError(f"{path}: found {human_size(path.stat().st_size)}, expected a {kind} file of a model")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, for json's object_pairs_hook. Raises ValueError for a key that is there twice; json drops one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


def read_json(path: Path | str, unique: bool = False) -> Any:
    """Parse a JSON file. Raises UserError naming the file if it is missing, malformed or not text.

    Args:
        unique: refuse a key that is there twice in an object.
    """
    text = read_text(path, "JSON")
    try:
        return json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except ValueError as e:  # malformed, or a number of more digits than Python reads
        raise UserError(f"{path} is not valid JSON ({e}): correct it, or copy it again if it is truncated") from None
    except RecursionError:
        raise UserError(f"{path} is not valid JSON: it is nested too deeply") from None


def object_in(path: Path, lines: bool = False) -> dict[str, Any]:
    """The JSON object in a file, or (`lines`) in its first line; {} if there is something else."""
    with suppress(UserError, OSError, ValueError, RecursionError):
        if not lines:
            found = read_json(path)
        else:
            with path.open("rb") as file:
                found = json.loads(file.readline(JSON_LIMIT))
        return found if isinstance(found, dict) else {}
    return {}


Types = Mapping[str, type | tuple[type, ...]]
"""Expected types of the values of a JSON object, by key."""

_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def read_object(
    path: Path | str, types: Types | None = None, required: Collection[str] = (), unique: bool = False
) -> dict[str, Any]:
    """The object in a JSON file, checked by `check_object`; `unique`: see `read_json`."""
    return check_object(read_json(path, unique), str(path), types, required)


def model_json(folder: Path | str) -> dict[str, Any]:
    """config.json of a model's folder. Raises UserError if there is none."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        found = "found no config.json" if path.is_dir() else "is a file" if path.exists() else "no such folder"
        gguf = " (GGUF is not read)" if path.suffix == ".gguf" or any(path.glob("*.gguf")) else ""
        raise UserError(f"{folder}: {found}; expected a folder in Hugging Face format{gguf}")
    return read_object(path / "config.json")


def check_object(value: Any, where: str, types: Types | None = None, required: Collection[str] = ()) -> dict[str, Any]:
    """Return `value` if it is an object of these types; else raise UserError naming source, key and expected type.

    Args:
        where: source of the value, for errors.
        types: types of optional keys. `float` accepts integers; null always counts as absent.
        required: keys that must be present.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: found {_NAMES.get(type(value), type(value).__name__)}, expected a JSON object")
    missing = [key for key in required if value.get(key) is None]
    if missing:
        raise UserError(f"{where}: missing {', '.join(missing)}")
    for key, expected in (types or {}).items():
        found = value.get(key)
        if found is not None and not _is_a(found, expected):
            kinds = expected if isinstance(expected, tuple) else (expected,)
            wanted = " or ".join(_NAMES[kind] for kind in kinds)
            raise UserError(f"{where}: {key} is {json.dumps(found)[:60]}, expected {wanted}")
    return value


def _is_a(value: Any, expected: type | tuple[type, ...]) -> bool:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> str:
    """'name: found 1, now 2; ...' for the values of `new` that differ from `old`, compared as JSON; '' for none."""
    new = json.loads(json.dumps(new))
    return "; ".join(f"{k}: found {old.get(k)!r}, now {v!r}" for k, v in new.items() if old.get(k) != v)


def sha256_of(path: Path | str) -> str:
    """SHA-256 of a file's contents, cached by size and modification time."""
    status = os.stat(path)
    return _sha256_of(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256_of(path: str, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
