"""Where the serving engines are installed: tools/setup_engines.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def engine_python(name: str) -> str:
    """The interpreter of an engine's environment; the test is skipped when it is not installed."""
    folder = Path(os.environ.get("MEGATRON_SPEC_ENGINES", ROOT / ".venv-engines"))
    python = folder / name / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is not there: run tools/setup_engines.sh (make test-engines)")
    return str(python)


def run_worker(name: str, script: str, *args: str, timeout: float = 1800) -> None:
    """Run a script of this folder in an engine's environment. Its output is shown when it fails."""
    command = [engine_python(name), str(Path(__file__).with_name(script)), *args]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # of our own environment, not of theirs
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
