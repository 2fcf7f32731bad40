#!/usr/bin/env bash
# Set up and run the tests: tools/test.sh [pytest arguments]
# Two workers, files whole on one of them; another number: -n 4; one process: -n 0.
# PYTHON chooses the interpreter of a new environment, VENV its folder (default .venv).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
tools/setup_venv.sh "$venv"
workers=(-n 2 --dist loadfile --no-loadscope-reorder)
case " $* " in *" -n"* | *" --dist"* | *" --numprocesses"*) workers=() ;; esac
# Threads that wait go to sleep soon: with several ranks on few cores, spinning ones keep the others waiting.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000} \
  exec "$venv/bin/python" -m pytest -q "${workers[@]}" "$@"
