#!/usr/bin/env bash
# Without a GPU: compile the Triton kernels for GPUs (TRITON=3.6.0: with another Triton), then run them in Triton's
# interpreter against plain tensors: tools/test_kernels.sh [pytest arguments of the second part]
# Triton (a gigabyte that a CPU does not need otherwise) goes to .cache, not into the virtual environment.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,4s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
tools/setup_venv.sh
triton=${TRITON:-3.9.0}
folder=$PWD/.cache/triton-$triton
if [ ! -d "$folder" ]; then
  rm -rf "$folder.part"
  PYTHONWARNINGS=ignore .venv/bin/python -m pip install --quiet --no-deps --target "$folder.part" "triton==$triton"
  mv "$folder.part" "$folder"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$folder
.venv/bin/python -m pytest -q -n 2 tests/compile
TRITON_INTERPRET=1 exec .venv/bin/python -m pytest -q -m gpu -n 2 \
  tests/gpu/test_kernels.py tests/gpu/test_decode_kernels.py tests/gpu/test_block_kernels.py tests/gpu/test_loss_kernels.py tests/gpu/test_fake_quant.py tests/gpu/test_fp8_kernels.py tests/gpu/test_expert_kernels.py tests/gpu/test_many_rows.py "$@"
