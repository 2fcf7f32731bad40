"""Output folders: checked before a run, and published as a whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_spec.config import UserError
from megatron_spec.runtime.files import rename, writing
from megatron_spec.runtime.temporary import leftovers, temporary_name


def require_empty(
    folder: Path | str, hint: str = "choose another folder or remove it", apart_from: Collection[str] = (),
    replaced: bool = False,
) -> None:  # fmt: skip
    """Raise UserError if an output folder is not empty or cannot be written.

    Temporary files of killed runs do not count.

    Args:
        replaced: a new folder takes its place (`published_folder`): hidden files count, and a mount point is refused.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, expected a folder")
    try:
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
    except OSError as e:
        raise UserError(f"{folder} cannot be read ({e.strerror}): choose another folder") from None
    found = [name for name in names if (replaced or not name.startswith(".")) and name not in apart_from]
    if found:
        hidden = f" (it has {found[0]})" if all(name.startswith(".") for name in found) else ""
        raise UserError(f"{folder} is not empty{hidden}: {hint}")
    if replaced and os.path.ismount(folder):
        raise UserError(f"{folder} is a mount point, which no folder can replace: choose a folder in it")
    require_writable(folder.resolve().parent if replaced else folder)


def require_writable(folder: Path | str) -> None:
    """Raise UserError unless the folder is writable, or can be created."""
    folder = Path(folder).absolute()
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:  # try it: permission bits do not show read-only mounts, or /proc
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=existing))
    except OSError as e:
        where = folder if existing == folder else f"{folder}: {existing}"
        raise UserError(f"{where} cannot be written ({e.strerror}): choose another folder") from None


@contextmanager
def published_folder(
    folder: Path | str, overwrite: bool = False, hint: str = "", size: int | None = None, unless: str = ""
) -> Iterator[Path]:
    """A temporary folder beside `folder` that replaces it if the block succeeds, and is removed otherwise.

    Args:
        size: bytes to be written, for the message.
        unless: name of a file. If `folder` has it by then, another process has published the same, and it is kept:
            that process may be reading it.

    Raises UserError if it cannot be written.
    """
    folder = Path(folder)
    if not overwrite:
        require_empty(folder, replaced=True)
    folder = folder.resolve()  # a link stays one
    temporary, aside = temporary_name(folder), _aside(folder)
    with writing(folder, size, hint):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in leftovers(folder):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in leftovers(folder.with_name(f"{folder.name}.old")):
            recover(folder, leftover)
        temporary.mkdir()
        try:
            yield temporary
            if not overwrite:
                _rename_to_new(temporary, folder)
            elif not (unless and (folder / unless).is_file()):
                replace_folder(temporary, folder, aside)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _rename_to_new(source: Path, folder: Path) -> None:
    try:
        rename(source, folder)  # takes the place of an empty folder alone
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise UserError(f"{folder} was written by another run meanwhile: choose another folder") from None


def _aside(folder: Path) -> Path:
    return temporary_name(folder.with_name(f"{folder.name}.old"))


def replace_folder(new: Path, folder: Path, aside: Path) -> None:
    """Rename a complete folder to a name that another folder may have, which is then removed.

    No call that works on every file system exchanges two folders. A process that is killed between two renames leaves
    the old folder at `aside`, for `recover`.
    """
    if folder.exists():
        os.rename(folder, aside)
    try:
        rename(new, folder)
    except BaseException:
        with suppress(OSError):
            os.rename(aside, folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover(folder: Path, aside: Path) -> None:
    """Finish or undo a `replace_folder` that was killed."""
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        os.rename(aside, folder)
