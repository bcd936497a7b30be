#!/usr/bin/env bash
# On a machine with Python >= 3.11 and nothing else: train a small GPT on the source text of the
# Python standard library with two CPU processes, first with DDP + autocast, then with shardcast,
# and compare the two: loss, memory, time, a picture. Each training says after ten steps how long it
# takes; on two idle cores both end within two minutes, or five where products go by way of fp32.
#
# Usage: bash launch/quickstart.sh [flags of launch/train.py]
# Environment: VENV, PYTHON (see environment.sh), SHARDCAST_CONFIG, OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment plot

output=${OUTPUT:-runs/quickstart}
export SHARDCAST_CONFIG=${SHARDCAST_CONFIG:-configs/bf16.yaml}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
    "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
        launch/train.py --device cpu "$@"
}

printf '\nTwo trainings of one GPT, with equal seeds, on two CPU processes;\n'
printf 'each says after ten steps how long it takes.\n'
printf '\n== 1 of 2: DDP + autocast ==\n'
train --baseline ddp --output "$output/ddp" "$@"
printf '\n== 2 of 2: shardcast ==\n'
train --output "$output/shardcast" "$@"
printf '\n== comparison ==\n'
"$python" launch/train.py --compare "$output/ddp" "$output/shardcast" --output "$output"
