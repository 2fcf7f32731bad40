"""The same commands inside a container: every local folder they name is mounted, read-only, under its own path."""

from __future__ import annotations

import json
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


def docker_command(image: str, command: list[str], port: int = 8000, also: Sequence[str] = ()) -> list[str]:
    """`docker run` around a server's command.

    Args:
        also: further words whose paths are needed inside.
    """
    docker = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host", "-p", f"{port}:{port}"]
    for path in _paths([*command, *also]):
        docker += ["-v", f"{path}:{path}:ro"]
    return [*docker, image, *command]
