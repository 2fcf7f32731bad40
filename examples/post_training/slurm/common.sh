# Sourced by the batch scripts here: one torchrun agent a node, one process a GPU.
#
# Set before sbatch, or in the environment that it passes on:
#   REPO       this repository                        [the folder above]
#   PYTHON     interpreter, inside the container      [python3]
#   CONTAINER  image for srun --container-image       [none: the node itself]
#   MOUNTS     for srun --container-mounts            [$REPO:$REPO and what you add]
#   GPUS       processes a node                       [SLURM_GPUS_ON_NODE, 8]
#   TP, PP     parallel sizes                         [8, 1]
#   PRECISION  --bf16, or empty for float32           [--bf16]
set -euo pipefail
REPO=${REPO:-$(cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")}" && git rev-parse --show-toplevel 2>/dev/null || pwd)}
PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
scripts=$REPO/examples/post_training
export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs that share a node must not meet
rendezvous=(--nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
  --rdzv-endpoint "$head_node:$port" --max-restarts 0)
container=()
[ -z "${CONTAINER:-}" ] || container=(--container-image "$CONTAINER" --container-mounts "${MOUNTS:-$REPO:$REPO}")

launch() { # script.py arguments... : on every node of the job; srun passes the whole environment on
  local script=$scripts/$1; shift
  srun --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit 1 --export ALL "${container[@]}" \
    "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" "$script" "$@"
}
