#!/usr/bin/env bash
# Run launch/train.py under accelerate launch.
#
# Usage: bash launch/accelerate.sh [flags of launch/train.py]
# Environment:
#   ACCELERATE_CONFIG  accelerate configuration (default: configs/accelerate/multi_gpu.yaml; without
#                      a GPU, configs/accelerate/cpu_two_processes.yaml)
#   SHARDCAST_CONFIG   shardcast configuration (default: configs/bf16.yaml)
#   NPROC              processes on all nodes (default: num_processes of ACCELERATE_CONFIG)
#   MACHINE_RANK, MAIN_PROCESS_IP  with multi_node.yaml, on each node
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"
export SHARDCAST_CONFIG=${SHARDCAST_CONFIG:-configs/bf16.yaml}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

on_path accelerate
if [[ -z ${ACCELERATE_CONFIG:-} ]]; then
    ACCELERATE_CONFIG=configs/accelerate/cpu_two_processes.yaml
    ! has_gpu || ACCELERATE_CONFIG=configs/accelerate/multi_gpu.yaml
fi
flags=(--config_file "$ACCELERATE_CONFIG")
[[ -z ${NPROC:-} ]] || flags+=(--num_processes "$NPROC")
[[ -z ${MACHINE_RANK:-} ]] || flags+=(--machine_rank "$MACHINE_RANK")
[[ -z ${MAIN_PROCESS_IP:-} ]] || flags+=(--main_process_ip "$MAIN_PROCESS_IP")
exec accelerate launch "${flags[@]}" launch/train.py "$@"
