#!/usr/bin/env bash
# Train the byte-level GPT, measure every fifth step, and draw docs/update-to-weight.svg, which shows
# how far each layer moves in a step. A minute on two idle cores.
#
# Usage: bash tools/update_to_weight.sh [flags of launch/train.py]
# Environment: VENV, PYTHON (see environment.sh), OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment plot

output=${OUTPUT:-runs/update_to_weight}
export SHARDCAST_CONFIG=configs/bf16.yaml SHARDCAST_METRICS=5 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
    launch/train.py --device cpu --output "$output" "$@"
"$python" tools/picture.py --update-to-weight --record "$output"
