#!/usr/bin/env bash
# Run launch/train.py under torchrun, on one node or (run on each node) on several.
#
# Usage: bash launch/torchrun.sh [flags of launch/train.py]
# Environment:
#   NPROC             processes per node: a number, gpu, cpu or auto (default: gpu; 2 without a GPU)
#   NNODES            number of nodes (default: 1); more need RDZV_ENDPOINT
#   RDZV_ENDPOINT     host:port of one node, equal on all nodes
#   RDZV_ID           name of the job, equal on all nodes (default: shardcast)
#   MAX_RESTARTS      restarts after a failure (default: 0); with --checkpoint-dir training continues
#                     from the newest checkpoint, also on fewer nodes (NNODES=1:4)
#   SHARDCAST_CONFIG  shardcast configuration (default: configs/bf16.yaml)
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"
export SHARDCAST_CONFIG=${SHARDCAST_CONFIG:-configs/bf16.yaml}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else most restarts fail; see docs/troubleshooting.md

rendezvous=(--standalone --local-addr=127.0.0.1) # a host's name need not resolve
if [[ ${NNODES:-1} != 1 ]]; then
    rendezvous=(
        --nnodes="$NNODES"
        --rdzv-backend=c10d
        --rdzv-endpoint="${RDZV_ENDPOINT:?host:port of one of the nodes}"
        --rdzv-id="${RDZV_ID:-shardcast}"
    )
fi
on_path torchrun
[[ -n ${NPROC:-} ]] || { has_gpu && NPROC=gpu; } || NPROC=2
exec torchrun "${rendezvous[@]}" --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-0}" launch/train.py "$@"
