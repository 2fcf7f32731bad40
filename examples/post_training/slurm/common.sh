# Sourced by the batch scripts here: one torchrun agent a node, one process a GPU. Jobs may be submitted from any folder.
#
# Set before sbatch, or in the environment that it passes on:
#   REPO       this repository                        [found by the script's own path]
#   PYTHON     interpreter, inside the container      [python3]
#   CONTAINER  image for srun --container-image       [none: the node itself]
#   MOUNTS     for srun --container-mounts            [$REPO:$REPO and what you add]
#   GPUS       processes a node                       [SLURM_GPUS_ON_NODE, 8]
#   TP, PP     parallel sizes                         [8, 1]
#   PRECISION  --bf16, or empty for float32           [--bf16]
#   SHARDS     of a job array: parts of the work      [the tasks of the array]
set -euo pipefail
REPO=${REPO:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)}
PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
scripts=$REPO/examples/post_training
export REPO PYTHON PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
container=()
[ -n "${CONTAINER:-}" ] || [ -z "${MOUNTS:-}" ] || echo "MOUNTS=$MOUNTS is not used: there is no CONTAINER" >&2
[ -z "${CONTAINER:-}" ] || container=(--container-image "$CONTAINER" --container-mounts "${MOUNTS:-$REPO:$REPO}")

on_nodes() { # command... : once on every node of the job; srun passes the whole environment on
  srun --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 --export ALL "${container[@]}" "$@"
}

launch() { # script.py arguments... : one process a GPU, on every node
  local script=$scripts/$1 head_node; shift
  head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  on_nodes "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
    --max-restarts 0 "$script" "$@" # the port differs from job to job: two may share a node
}

part() { # prints I/N: this task's part of the work
  local tasks=${SLURM_ARRAY_TASK_COUNT:-1} index=${SLURM_ARRAY_TASK_ID:-0}
  if [ -z "${SHARDS:-}" ] && [ "${SLURM_ARRAY_TASK_MAX:-$((tasks - 1))}" -ne $((tasks - 1)) ]; then
    echo "an array of $tasks tasks up to number $SLURM_ARRAY_TASK_MAX: set SHARDS, the parts of the whole work" >&2
    return 2
  fi
  if [ "$index" -ge "${SHARDS:-$tasks}" ]; then
    echo "task $index of SHARDS=${SHARDS:-$tasks}: parts are numbered from 0" >&2
    return 2
  fi
  echo "$index/${SHARDS:-$tasks}"
}
