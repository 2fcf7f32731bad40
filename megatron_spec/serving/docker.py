"""The same commands inside a container: every local folder they name is mounted, read-only, under its own path.

A snapshot of the Hugging Face cache is a folder of links into `../../blobs`: what links lead to is mounted as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)


def _paths(command: Sequence[str]) -> list[str]:
    """Absolute paths that exist and that a command names, also inside JSON."""
    words = [text for word in command for text in _texts(json.loads(word) if word.startswith("{") else word)]
    return list(dict.fromkeys(w for w in words if w.startswith("/") and Path(w).exists()))


def _link_targets(folder: Path) -> dict[Path, list[Path]]:
    """Where the links in a folder lead outside of it: the files, by the folder that holds them."""
    found: dict[Path, list[Path]] = {}
    for inner, folders, files in os.walk(folder):
        links = [Path(inner, name) for name in folders + files if Path(inner, name).is_symlink()]
        for link in links:
            target = Path(os.path.normpath(Path(inner, os.readlink(link))))
            if link.exists() and not target.is_relative_to(folder):
                found.setdefault(target.parent, []).append(target)
    return found


def mounts(paths: Sequence[str]) -> dict[str, str]:
    """{path inside the container: resolved path here} for paths and for what the links below them lead to.

    One folder is mounted for several files in it.
    """
    found: dict[str, str] = {}

    def add(path: Path) -> None:
        if not any(path.is_relative_to(known) for known in found):
            found[str(path)] = str(path.resolve())

    for path in map(Path, paths):
        add(path)
        for folder, targets in _link_targets(path).items() if path.is_dir() else ():
            whole = len(targets) > 1 and not any(target.is_symlink() for target in targets)
            for target in [folder] if whole else targets:
                add(target)
    return found


def _mount_option(target: str, source: str) -> str:
    """Value of --mount: fields separated by commas, in quotes where a path holds one of its own."""
    fields = ["type=bind", f"source={source}", f"target={target}", "readonly"]
    return ",".join('"' + f.replace('"', '""') + '"' if set(f) & set('",') else f for f in fields)


def docker_command(image: str, command: list[str], port: int = 8000, also: Sequence[str] = ()) -> list[str]:
    """`docker run` around a server's command.

    Args:
        also: further words whose paths are needed inside.
    """
    docker = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host", "-p", f"{port}:{port}"]
    for target, source in mounts(_paths([*command, *also])).items():
        docker += ["--mount", _mount_option(target, source)]
    return [*docker, image, *command]
