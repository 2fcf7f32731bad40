#!/usr/bin/env bash
# Make the virtual environment that scripts and tests run in, once: tools/setup_venv.sh [FOLDER]  (default .venv)
# PYTHON chooses the interpreter; otherwise the first of python3.11, python3.12, python3.10, python3 that fits.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
venv=${1:-.venv}
if [ -L "$venv" ]; then exit 0; fi # a link to the environment of another checkout (git worktrees): used as it is
stamp=$(cat setup.py constraints.txt | cksum)
if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$stamp" ]; then exit 0; fi

first_imports='
import importlib
for name in ("megatron_spec.commands.convert", "megatron_spec.commands.decode", "megatron_spec.commands.export",
             "megatron_spec.commands.finetune", "megatron_spec.commands.quantize", "torch._dynamo", "gguf", "pytest",
             "xdist.plugin", "matplotlib.pyplot", "transformers.models.auto.tokenization_auto", "transformers.conversion_mapping"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # another version of a package: it is compiled when it is imported
'

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.10 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then python=$candidate; break; fi
  done
fi
if [ -n "${PYTHON:-}" ] && ! fits "$python"; then
  echo "error: PYTHON=$python is $("$python" --version 2>/dev/null || echo no program): expected Python 3.10-3.12 with the venv module" >&2
  exit 2
fi
if [ -z "$python" ]; then
  echo "error: found no Python 3.10-3.12 with the venv module: on Debian 'apt-get install python3 python3-venv', or set PYTHON=..." >&2
  exit 2
fi
echo "setting up $venv with $("$python" --version) (once; a few minutes)" >&2
rm -f "$venv/.ready"
"$python" -m venv --clear "$venv" # another interpreter may have made the old one
"$venv/bin/python" -m pip install --quiet --upgrade pip
# pip would compile 16,000 modules to bytecode, which takes longer than the rest of the installation; a quarter of them
# is ever imported, and compiled here, because PYTHONDONTWRITEBYTECODE may keep later imports from it.
PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
PYTHONWARNINGS=ignore PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -c "$first_imports" >/dev/null
printf '%s\n' "$stamp" > "$venv/.ready"
