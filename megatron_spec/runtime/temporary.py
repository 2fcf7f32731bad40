"""Names of files and folders that are being written, and those that killed processes left. Standard library only."""

from __future__ import annotations

import glob
import os
import re
import socket
import time
import zlib
from contextlib import suppress
from pathlib import Path

FORGOTTEN = 86400
"""Seconds after which another machine's temporary file that nobody writes counts as left over."""


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process has: not on this machine, and not on one that shares the folder."""
    return path.with_name(f"{_prefix(path)}{_host()}-{os.getpid()}")


def _prefix(path: Path) -> str:
    return f".{path.name}.tmp-"


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def final_path(path: Path | str) -> Path:
    """The final path of a temporary name: the one that the user gave."""
    return Path(*(re.sub(r"^\.(.+)\.tmp-\w{8}-\d+$", r"\1", part) for part in Path(path).absolute().parts))


def leftovers(path: Path) -> list[Path]:
    """Temporary files of killed processes beside `path`; those of another machine after `FORGOTTEN` seconds."""
    found = []
    for other in path.parent.glob(f"{glob.escape(_prefix(path))}*-*"):
        host, _, pid = other.name.removeprefix(_prefix(path)).rpartition("-")
        if pid.isdecimal() and (_is_old(other) if host != _host() else not process_exists(int(pid))):
            found.append(other)
    return found


def _is_old(path: Path) -> bool:
    """True if nothing was written there for `FORGOTTEN` seconds."""
    with suppress(FileNotFoundError):  # it is being written: finished since
        return time.time() - max(p.stat().st_mtime for p in (path, *path.rglob("*"))) > FORGOTTEN
    return False


def process_exists(pid: int) -> bool:
    """True if another process with this id runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid != os.getpid()
