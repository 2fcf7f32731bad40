"""Lock of an output: one run at a time.

FOLDER/.lock, or FILE.lock, names host and process of the run. The system releases a file lock when its process ends,
so on the same machine the lock of a killed run is free at once. On network file systems the lock may not reach other
machines: from there it counts as stale when the file, which a run touches every `TOUCH` seconds, has not changed for
`STALE` seconds. A run that starts earlier waits, as a killed job may be started again on another machine at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_spec.config import UserError
from megatron_spec.runtime.files import writing
from megatron_spec.runtime.temporary import process_exists

log = logging.getLogger(__name__)

NAME = ".lock"
TOUCH, STALE = 10.0, 60.0


def _parsed(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    return {}


def _owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return _parsed(path.read_bytes())
    return {}


def _refuse(path: Path, output: Path, owner: dict[str, Any]) -> UserError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
    return UserError(
        f"{output} is in use by {who} (since {owner.get('since', '?')}): wait for that run or end it, or give another "
        f"{'folder' if path.parent == output else 'file'}; if it is gone, remove {path}"
    )


def _take(path: Path, output: Path) -> tuple[int, bool]:
    """(file descriptor of the lock, whether a file lock is held). Raises UserError if another run has it."""
    while True:
        handle, locked = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), True
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(handle)
            raise _refuse(path, output, _owner(path)) from None
        except OSError:  # a file system without locks: rely on the contents of the file
            locked = False
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                return handle, locked
        os.close(handle)  # the previous run removed the file in the meantime


def _check_owner(path: Path, output: Path, handle: int, locked: bool) -> None:
    """Refuse an output whose owner still runs where file locks do not show it: another machine, or no file locks."""
    owner = _parsed(os.pread(handle, 4096, 0))  # closing a second descriptor would release the lock
    if owner.get("host") == socket.gethostname():
        alive = not locked and process_exists(int(owner.get("pid", 0)))
    else:
        alive = bool(owner) and _is_touched(path, owner)
    if alive:
        raise _refuse(path, output, owner)


def _is_touched(path: Path, owner: dict[str, Any]) -> bool:
    """True if a run on another machine touches the file. Waits until that shows, `STALE` seconds at most."""
    seen = path.stat().st_mtime
    if _clock_of(path) - seen >= STALE:
        return False
    log.warning("%s is of a run on %s: waiting to see whether it was killed", path, owner.get("host"))
    while _clock_of(path) - seen < STALE:
        time.sleep(1)
        try:
            if path.stat().st_mtime != seen:
                return True
        except FileNotFoundError:  # it ended
            return True
    return False


def _clock_of(path: Path) -> float:
    """The file system's time, which may differ from this machine's."""
    probe = path.with_name(f"{path.name}.now-{os.getpid()}")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def exclusive(output: Path | str, file: bool = False) -> Iterator[None]:
    """Lock the output of a run. Raises UserError naming host and process if another run has it.

    Args:
        file: the output is a file, and the lock is beside it; else a folder, with the lock in it.
    """
    output = Path(output)
    path = output.with_name(f"{output.name}{NAME}") if file else output / NAME
    folder = path.parent
    made = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, locked = _take(path, output)
    done = threading.Event()

    def touch() -> None:
        """Show other machines that the lock is held."""
        while not done.wait(TOUCH):
            with contextlib.suppress(OSError):
                os.utime(handle)

    try:
        _check_owner(path, output, handle, locked)
    except BaseException:
        os.close(handle)
        raise
    try:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with writing(folder):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(about).encode(), 0)
    except BaseException:
        _release(path, handle, made)
        raise
    threading.Thread(target=touch, name="lock", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _release(path, handle, made)


def _release(path: Path, handle: int, made: bool) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        if made and not any(path.parent.iterdir()):  # the run failed before it wrote anything
            path.parent.rmdir()
    os.close(handle)
