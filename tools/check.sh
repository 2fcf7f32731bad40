#!/usr/bin/env bash
# Quick tests: the unit tests of what changed since main, or a core: tools/check.sh [pytest arguments]
# A change counts when it is committed on the branch, staged, or in the working tree. BASE=branch compares with another branch.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
base=$(git merge-base HEAD "${BASE:-main}" 2>/dev/null || git rev-parse HEAD)
changed=$(git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard)
tests=()
while read -r file; do
  case $file in
    tests/unit_tests/*/test_*.py | tests/unit_tests/test_*.py) tests+=("$file") ;;
    tests/unit_tests/*/*.py) tests+=("$(dirname "$file")") ;;
    megatron_spec/*/*.py) package=${file#megatron_spec/}; tests+=("tests/unit_tests/${package%%/*}") ;;
    tools/* | benchmarks/* | *.md) tests+=(tests/unit_tests/tools/test_pages.py tests/unit_tests/tools/test_file_tree.py) ;;
  esac
done <<<"$changed"
existing=()
for path in $(printf '%s\n' "${tests[@]}" | sort -u); do [ -e "$path" ] && existing+=("$path"); done
core=(tests/unit_tests/{losses,ops,planning,drafts,test_config.py,test_cli.py})
# Changes all over the package: the core, and the changed tests themselves.
if [ ${#existing[@]} -eq 0 ]; then existing=("${core[@]}"); fi
if [ ${#existing[@]} -gt 6 ]; then
  mapfile -t files < <(printf '%s\n' "${existing[@]}" | grep '\.py$' || true)
  existing=("${core[@]}" "${files[@]}")
fi
echo "checking ${existing[*]}" >&2
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000} \
  exec .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --timeout 180 "${existing[@]}" "$@"
