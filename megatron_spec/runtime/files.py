"""Writing so that nothing half-written is ever found: a temporary name first, then one rename."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError


def write_text(path: Path | str, text: str) -> None:
    """Replace a file atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path | str, value: Any) -> None:
    """Replace a file by indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Parse a JSON file. Raises UserError naming the file when it is missing or malformed."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid JSON: {e}") from None


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> str:
    """'name: found 1, now 2; ...' for what `new` has otherwise than `old`, as JSON holds it; '' for nothing."""
    new = json.loads(json.dumps(new))
    return "; ".join(f"{k}: found {old.get(k)!r}, now {v!r}" for k, v in new.items() if old.get(k) != v)


def sha256_of(path: Path | str) -> str:
    """SHA-256 of a file's content; read once as long as size and time of change stay the same."""
    status = os.stat(path)
    return _sha256_of(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256_of(path: str, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def require_empty(
    folder: Path | str, hint: str = "choose another folder or remove it", apart_from: Collection[str] = ()
) -> None:
    """Raise UserError when an output folder already holds something (a temporary of a killed run does not count)."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, expected a folder")
    if folder.is_dir() and any(not p.name.startswith(".") and p.name not in apart_from for p in folder.iterdir()):
        raise UserError(f"{folder} is not empty: {hint}")


def _leftovers(folder: Path) -> list[Path]:
    """Temporary folders that killed runs left beside `folder`."""
    prefix = f".{folder.name}.tmp-"
    return [p for p in folder.parent.iterdir() if p.name.startswith(prefix) and p.name[len(prefix) :].isdecimal()]


@contextmanager
def published_folder(folder: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and is removed otherwise."""
    folder = Path(folder)
    if not overwrite:
        require_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    for leftover in _leftovers(folder):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
