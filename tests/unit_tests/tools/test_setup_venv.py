"""tools/setup_venv.sh with a stand-in for Python: what it installs and compiles, once."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "setup_venv.sh"
PYTHON = """#!/usr/bin/env bash
echo "$* [${PYTHONDONTWRITEBYTECODE-unset}]" | tr '\\n' ' ' >> "$CALLS"; echo >> "$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; fi
"""


def test_set_up_once(tmp_path: Path) -> None:
    python, calls, venv = tmp_path / "python", tmp_path / "calls", tmp_path / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "CALLS": str(calls), "PYTHONDONTWRITEBYTECODE": "1"}
    for _ in range(2):
        subprocess.run(["bash", str(SCRIPT), str(venv)], env={**os.environ, **own}, check=True, capture_output=True)
    [install] = [line for line in calls.read_text().splitlines() if "constraints.txt" in line]
    assert "--no-compile" in install and ".[dev]" in install and (venv / ".ready").is_file()
    compiled = calls.read_text().splitlines()[-1].rstrip()
    assert "import importlib" in compiled and compiled.endswith("[]"), "bytecode is written"
    names = re.findall(r'"(megatron_spec[^"]*)"', compiled)
    assert names and all(importlib.util.find_spec(name) for name in names)


def test_an_interpreter_that_does_not_fit_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.13.0\n")
    python.chmod(0o755)
    for asked, said in ((str(python), f"PYTHON={python} is Python 3.13.0: expected"), ("nope", "nope is no program:")):
        done = subprocess.run(
            ["bash", str(SCRIPT), str(tmp_path / "venv")], env={**os.environ, "PYTHON": asked}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sh")), ids=lambda path: path.name)
def test_help_of_shell_scripts_starts_nothing(script: Path, tmp_path: Path) -> None:
    if script.name == "test.sh":  # it passes --help on to pytest
        return
    done = subprocess.run(["bash", str(script), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"tools/{script.name}" in done.stdout and not done.stderr
