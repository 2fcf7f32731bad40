"""Server commands in a container: every local folder they name is mounted read-only under the same path.

A snapshot in the Hugging Face cache is a folder of links into `../../blobs`, so link targets are mounted as well.
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
    """Existing absolute paths in a command, including those inside JSON."""
    words = [text for word in command for text in _texts(json.loads(word) if word.startswith("{") else word)]
    return list(dict.fromkeys(w for w in words if w.startswith("/") and Path(w).exists()))


def _link_targets(folder: Path) -> dict[Path, list[Path]]:
    """Targets of a folder's links outside the folder: files, by the folder that contains them."""
    found: dict[Path, list[Path]] = {}
    for inner, folders, files in os.walk(folder):
        links = [Path(inner, name) for name in folders + files if Path(inner, name).is_symlink()]
        for link in links:
            target = Path(os.path.normpath(Path(inner, os.readlink(link))))
            if link.exists() and not target.is_relative_to(folder):
                found.setdefault(target.parent, []).append(target)
    return found


def mounts(paths: Sequence[str]) -> dict[str, str]:
    """{path in the container: resolved local path} for paths and for the targets of links below them.

    Several files of one folder share a mount.
    """
    found: dict[str, str] = {}

    def add(path: Path) -> None:
        """Mount a path unless one of its parents is mounted."""
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
    """Value of --mount: comma-separated fields, quoted where a path contains a comma."""
    fields = ["type=bind", f"source={source}", f"target={target}", "readonly"]
    return ",".join('"' + f.replace('"', '""') + '"' if set(f) & set('",') else f for f in fields)


def hub_options() -> list[str]:
    """Options that pass the hub's cache and token to a container, for models named as on the hub.

    The token is passed by the name of its variable, so no command line shows it. Without a local cache the container
    gets a volume of its own and downloads each model only once.
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
        ports: ports to publish, under the same numbers.
        also: further arguments whose paths are mounted.
        written: files to mount that may not exist yet.
        hub: whether a model is given by its name on the hub.
    """
    docker = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    for port in ports:
        docker += ["-p", f"{port}:{port}"]
    for target, source in mounts([*_paths([*command, *also]), *written]).items():
        docker += ["--mount", _mount_option(target, source)]
    return [*docker, *(hub_options() if hub else []), image, *command]
