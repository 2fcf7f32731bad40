#!/usr/bin/env bash
# Set up and run the tests: tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup_venv.sh
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} exec .venv/bin/python -m pytest -q "$@"
