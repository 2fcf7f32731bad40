"""The same commands inside a container: every local folder they name is mounted, read-only, under its own path.

A snapshot of the Hugging Face cache is a folder of links into `../../blobs`: what links lead to is mounted as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HUB_CACHE = "/root/.cache/huggingface"


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
        """Mount a path unless a folder above it is mounted."""
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


def hub_options() -> list[str]:
    """Options that give a container the hub's cache and token, for models named as on the hub.

    The token goes by the name of its variable, so that no command line shows it. Without a cache here the container
    gets a volume of its own, so that it downloads a model only once.
    """
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    source = f"type=bind,source={cache.resolve()}" if cache.is_dir() else "type=volume,source=huggingface"
    return ["--mount", f"{source},target={HUB_CACHE}", "--env", "HF_TOKEN", "--env", f"HF_HOME={HUB_CACHE}"]


def docker_command(
    image: str, command: list[str], ports: Sequence[int] = (8000,), also: Sequence[str] = (),
    written: Sequence[str] = (), hub: bool = False,
) -> list[str]:  # fmt: skip
    """`docker run` around a server's command.

    Args:
        ports: published under the same numbers.
        also: further words whose paths are needed inside.
        written: files needed inside that may not exist yet.
        hub: a model is named as on the hub.
    """
    docker = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    for port in ports:
        docker += ["-p", f"{port}:{port}"]
    for target, source in mounts([*_paths([*command, *also]), *written]).items():
        docker += ["--mount", _mount_option(target, source)]
    return [*docker, *(hub_options() if hub else []), image, *command]
