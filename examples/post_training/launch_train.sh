#!/usr/bin/env bash
# Train an EAGLE-3 draft on one node: convert once, then finetune; started again it goes on where it was.
#
#   bash launch_train.sh --model /models/llama --data train.jsonl --output_dir runs/llama --num_gpu 8 --num_epochs 2
#   bash launch_train.sh --model /models/llama --offline-data FEATURES --output_dir runs/llama --num_gpu 8 --num_epochs 2
set -euo pipefail

usage() {
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  cat <<'END'
options (defaults in brackets):
  --model DIR          base: Hugging Face folder or Megatron checkpoint
  --data FILE          conversations (JSON lines)
  --offline-data DIR   instead: features of offline_feature_extract.py; no base layers are loaded
  --output_dir DIR     DIR/draft (the fresh draft) and DIR/run (checkpoints, metrics.jsonl)
  --num_gpu N          processes, one per GPU; 0: one process on the CPU [1]
  --num_epochs N       passes over the data [1]
  --eagle_config FILE  architecture of the draft as JSON [one layer like the base's]
  --draft_vocab DIR    of tools/calibrate_draft_vocab.py [the whole vocabulary]
  --tp N, --pp N       tensor and pipeline parallel sizes [1]
  --batch N            global batch size [8 for each data parallel rank]
What follows -- goes to finetune.py as it is, for example: -- --lr 2e-4 --seq-length 4096 --packing
END
}

root=$(cd "$(dirname "$0")/../.." && pwd)
scripts=$root/examples/post_training
model="" data="" offline="" output="" num_gpu=1 epochs=1 eagle="" vocab="" tp=1 pp=1 batch=""
fail() { echo "error: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  [ "$1" = -- ] && { shift; break; }
  case $1 in -h|--help) usage; exit 0 ;; esac
  [ $# -ge 2 ] || fail "$1 needs a value"
  case $1 in
    --model) model=$2 ;; --data) data=$2 ;; --offline-data) offline=$2 ;; --output_dir) output=$2 ;;
    --num_gpu) num_gpu=$2 ;; --num_epochs) epochs=$2 ;; --eagle_config) eagle=$2 ;; --draft_vocab) vocab=$2 ;;
    --tp) tp=$2 ;; --pp) pp=$2 ;; --batch) batch=$2 ;;
    *) usage >&2; fail "unknown option $1" ;;
  esac
  shift 2
done
[ -n "$model" ] && [ -n "$output" ] || { usage >&2; fail "--model and --output_dir are needed"; }
[ -n "$data$offline" ] && [ -z "${data:+$offline}" ] || fail "give one of --data and --offline-data"
number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2: expected a whole number of at least 1"; }
number --num_epochs "$epochs"; number --tp "$tp"; number --pp "$pp"; number --batch "${batch:-1}"
[ "$num_gpu" = 0 ] || number --num_gpu "$num_gpu"
[ -d "$model" ] || fail "--model $model: no such folder"
[ -z "$data" ] || [ -f "$data" ] || fail "--data $data: no such file"
[ -z "$offline" ] || [ -f "$offline/manifest.json" ] || fail "--offline-data $offline holds no features (manifest.json is missing)"

python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
ranks=$((num_gpu > 1 ? num_gpu : 1))
: "${batch:=$((8 * ranks / tp))}"

launch() { # script arguments...
  local script=$scripts/$1; shift
  local flags=(--tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp")
  [ "$num_gpu" -eq 0 ] || flags+=(--bf16)
  if [ "$num_gpu" -gt 1 ]; then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$num_gpu" "$script" "${flags[@]}" "$@"
  else
    "$python" "$script" "${flags[@]}" "$@"
  fi
}

[ -f "$output/draft/latest_checkpointed_iteration.txt" ] || launch convert_model.py --load "$model" \
  --save "$output/draft" ${eagle:+--eagle-config "$eagle"} ${vocab:+--draft-vocab "$vocab"}
launch finetune.py --load "$output/draft" --save "$output/run" ${data:+--data "$data"} \
  ${offline:+--offline-data "$offline"} --global-batch-size "$batch" --train-epochs "$epochs" \
  --save-interval 200 --async-save "$@"
