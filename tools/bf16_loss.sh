#!/usr/bin/env bash
# Train the byte-level GPT with fp32 masters (DDP + autocast, shardcast) and with a bf16 model whose
# optimizer inherits its dtype, and draw docs/bf16-loss.svg. Five minutes on two idle cores.
#
# Usage: bash tools/bf16_loss.sh [flags of launch/train.py]
# Environment: VENV, PYTHON (see environment.sh), OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment plot

output=${OUTPUT:-runs/bf16_loss}
export SHARDCAST_CONFIG=configs/bf16.yaml OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
    "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
        launch/train.py --device cpu --learning-rate 1e-4 --steps 600 --validation-interval 100 "$@"
}

train --baseline ddp --output "$output/ddp" "$@"
train --baseline bf16 --output "$output/bf16" "$@"
train --output "$output/shardcast" "$@"
"$python" tools/picture.py --bf16-loss --record "$output"/{ddp,bf16,shardcast}
