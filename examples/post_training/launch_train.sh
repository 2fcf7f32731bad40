#!/usr/bin/env bash
# Train a draft on one node: convert once, then finetune; resumes when started again.
#
#   bash launch_train.sh --model /models/llama --data train.jsonl --output_dir runs/llama --num_gpu 8 --num_epochs 2
#   bash launch_train.sh --model /models/llama --offline-data FEATURES --output_dir runs/llama --num_gpu 8 --num_epochs 2
set -euo pipefail

usage() {
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  cat <<'END'
options (defaults in brackets):
  --model DIR          base: Hugging Face folder, name on the hub, or Megatron checkpoint
  --data FILE          conversations (JSON lines)
  --offline-data DIR   features of offline_feature_extract.py; they contain their conversations, so --data is not read,
                       and no base layers are loaded
  --algorithm NAME     eagle3, eagle3.1, eagle1, eagle-mtp, mtp-from-base (the prediction module that the base
                       ships), p-eagle, medusa, dflash or dspark [eagle3]
  --output_dir DIR     DIR/draft (the fresh draft) and DIR/run (checkpoints, metrics.jsonl)
  --num_gpu N          processes, one per GPU; 0: one process on the CPU [1]
  --num_epochs N       passes over the data [1]
  --eagle_config FILE  architecture of an EAGLE, DFlash or DSpark draft as JSON [layers like the base's]
  --draft_vocab DIR    of tools/calibrate_draft_vocab.py [the whole vocabulary]
  --tp N, --pp N       tensor and pipeline parallel sizes [1]
  --batch N            global batch size [8 for each data parallel rank]
  --eval_data FILE     held-out prompts: every --eval_interval steps the base decodes them with the draft, and
                       DIR/run/best keeps the best [runs/mt_bench.jsonl, if it exists and --data is given]
  --eval_interval N    [200]
Everything after -- is passed to finetune.py unchanged, for example: -- --lr 2e-4 --seq-length 4096 --packing
PYTHON in the environment is the interpreter [.venv/bin/python of the repository, if it exists; else python3]
END
}

root=$(cd "$(dirname "$0")/../.." && pwd)
scripts=$root/examples/post_training
model="" data="" offline="" output="" num_gpu=1 epochs=1 eagle="" vocab="" tp=1 pp=1 batch="" algorithm=eagle3 eval="" eval_interval=""
fail() { echo "error: $1" >&2; exit 2; }
. "$scripts/algorithms.sh"
while [ $# -gt 0 ]; do
  [ "$1" = -- ] && { shift; break; }
  case $1 in -h|--help) usage; exit 0 ;; esac
  given "$1" $# "${2:-}"
  case $1 in
    --algorithm) algorithm=$2 ;; --eval_data) eval=$2 ;; --eval_interval) eval_interval=$2 ;;
    --model) model=$2 ;; --data) data=$2 ;; --offline-data) offline=$2 ;; --output_dir) output=$2 ;;
    --num_gpu) num_gpu=$2 ;; --num_epochs) epochs=$2 ;; --eagle_config) eagle=$2 ;; --draft_vocab) vocab=$2 ;;
    --tp) tp=$2 ;; --pp) pp=$2 ;; --batch) batch=$2 ;;
    *) usage >&2; fail "unknown option $1" ;;
  esac
  shift 2
done
[ -n "$model" ] && [ -n "$output" ] || { usage >&2; fail "--model and --output_dir are needed"; }
[ -n "$data$offline" ] || fail "give --data or --offline-data"
if [ -n "$data" ] && [ -n "$offline" ]; then
  echo "--offline-data includes its conversations: --data $data is not read" >&2
  data=""
fi
draft_flags "$algorithm" "$eagle"
case $algorithm in
  medusa) [ -z "$eagle" ] || fail "--eagle_config: Medusa heads have none" ;;
  mtp-from-base)
    [ -z "$eagle$vocab" ] || fail "--eagle_config, --draft_vocab: mtp-from-base takes the base's module unchanged: leave them out" ;;
esac
number --num_epochs "$epochs"; number --tp "$tp"; number --pp "$pp"; number --batch "${batch:-1}"
number --eval_interval "${eval_interval:-200}"
[ "$num_gpu" = 0 ] || number --num_gpu "$num_gpu"
[ -d "$model" ] || [[ $model =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+$ ]] || fail "--model $model: no such folder"
[ -z "$eagle" ] || [ -f "$eagle" ] || fail "--eagle_config $eagle: no such file"
[ -z "$vocab" ] || [ -e "$vocab" ] || fail "--draft_vocab $vocab: no such folder"
[ -z "$data" ] || [ -f "$data" ] || fail "--data $data: no such file"
[ -z "$offline" ] || [ -f "$offline/manifest.json" ] || fail "--offline-data $offline has no features (manifest.json is missing)"

if [ -z "$eval" ] && [ -n "$data" ]; then
  if [ -f "$root/runs/mt_bench.jsonl" ]; then eval=$root/runs/mt_bench.jsonl
  else echo "no held-out prompts: for acceptance while it trains run python $root/tools/prepare_conversations.py mt_bench" \
    "--make-prompts --output $root/runs/mt_bench.jsonl, or give --eval_data" >&2; fi
fi
[ -z "$eval" ] || [ -f "$eval" ] || fail "--eval_data $eval: no such file"
[ -z "$eval" ] || [ -z "$offline" ] || fail "--eval_data decodes with the base, whose layers --offline-data leaves out"
[ -z "$eval_interval" ] || [ -n "$eval" ] || fail "--eval_interval does nothing without --eval_data: give it, or leave it out"
evaluation=(${eval:+--eval-data "$eval" --eval-acceptance-interval "${eval_interval:-200}"})

python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
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

# The folder records the base and architecture of its draft: others would be another run.
here() { if [ -d "$1" ]; then (cd "$1" && pwd); else echo "$1"; fi; }
made="--model $(here "$model") --algorithm $algorithm --draft_vocab $(here "$vocab") --eagle_config ${eagle:+$(cksum < "$eagle")}"
if [ ! -f "$output/draft/latest_checkpointed_iteration.txt" ]; then
  launch convert_model.py --load "$model" "${kind[@]}" --save "$output/draft" ${vocab:+--draft-vocab "$vocab"}
  printf '%s\n' "$made" > "$output/draft.options"
elif [ ! -f "$output/draft.options" ]; then
  [ -z "$eagle$vocab" ] || fail "$output/draft is there: --eagle_config and --draft_vocab do nothing, leave them out"
  echo "training $output/draft as it is, on its own base: --model and --algorithm are not read" >&2
elif [ "$(cat "$output/draft.options")" != "$made" ]; then
  fail "$output/draft was made with other options ($(differences "$output/draft.options" "$made")): choose another --output_dir, or remove it"
fi
launch finetune.py --load "$output/draft" --save "$output/run" ${data:+--data "$data"} \
  ${offline:+--offline-data "$offline"} --global-batch-size "$batch" --train-epochs "$epochs" \
  --save-interval 200 --async-save "${evaluation[@]}" "$@"
