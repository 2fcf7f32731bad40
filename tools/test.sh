#!/usr/bin/env bash
# Set up and run the tests: tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup_venv.sh
# Threads that wait go to sleep soon: with several ranks on few cores, spinning ones keep the others waiting.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000} exec .venv/bin/python -m pytest -q "$@"
