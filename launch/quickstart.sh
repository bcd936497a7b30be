#!/usr/bin/env bash
# Train a small GPT on the source text of Python's standard library with two CPU processes, first
# with DDP + autocast, then with shardcast. Compare loss, memory and time, and draw a picture. Needs
# only Python 3.11 or later. After ten steps each run prints how long it will take. On two idle cores
# both end within two minutes, or within five if the CPU has no fast bf16 matmul.
#
# Usage: bash launch/quickstart.sh [flags of launch/train.py]
# Environment: VENV, PYTHON (see environment.sh), SHARDCAST_CONFIG, OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"
environment plot

output=${OUTPUT:-runs/quickstart}
export SHARDCAST_CONFIG=${SHARDCAST_CONFIG:-configs/bf16.yaml}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
    "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
        launch/train.py --device cpu "$@"
}

printf '\nThis trains one GPT twice, with equal seeds, on two CPU processes.\n'
printf 'After ten steps each run prints how long it will take.\n'
printf '\n== 1 of 2: DDP + autocast ==\n'
train --baseline ddp --output "$output/ddp" "$@"
printf '\n== 2 of 2: shardcast ==\n'
train --output "$output/shardcast" "$@"
printf '\n== comparison ==\n'
"$python" launch/train.py --compare "$output/ddp" "$output/shardcast" --output "$output"
