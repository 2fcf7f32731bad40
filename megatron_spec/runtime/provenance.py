"""run.json beside every artefact: versions, command and configuration that made it. Standard library only."""

from __future__ import annotations

import importlib.metadata
import platform as host
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_spec import __version__
from megatron_spec.runtime.files import read_object, write_json

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "transformers", "safetensors")


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that affect results; None if absent."""
    found: dict[str, str | None] = {"megatron_spec": __version__, "python": host.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_sha() -> str | None:
    """Commit of the source tree, with '+' if there are changes; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        run = ["git", "-C", str(root)]
        sha = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        dirty = subprocess.run([*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
        return sha.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def trained_steps(folder: Path) -> int | None:
    """--ttt-steps of the training behind an exported draft; None for a folder that does not say."""
    file = folder / "run.json"
    config = read_object(file).get("config") if file.is_file() else None
    found = config.get("ttt_steps") if isinstance(config, dict) else None
    return found if isinstance(found, int) else None


def write_run_json(folder: Path | str, config: dict[str, Any]) -> None:
    """Write FOLDER/run.json."""
    write_json(
        Path(folder) / "run.json",
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "argv": sys.argv,
            "versions": versions(),
            "git": git_sha(),
            "config": config,
        },
    )
