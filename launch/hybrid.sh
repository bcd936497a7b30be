#!/usr/bin/env bash
# Train a small GPT with 2 x 2 x 2 tensor, pipeline and data parallelism on eight CPU processes, and
# on the same text with torch's own optimizer in one process. Then draw both losses and their
# difference. Takes about two minutes on two cores.
#
# Usage: bash launch/hybrid.sh [flags of launch/train_hybrid.py, such as --schedule Interleaved1F1B]
# Environment: VENV, PYTHON (see environment.sh), OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"
environment plot

output=${OUTPUT:-runs/hybrid}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
common=(--device cpu --config configs/fp32.yaml --tie-head "$@")

printf '\n== one process, torch.optim.AdamW ==\n'
"$python" launch/train_hybrid.py --baseline --output "$output/one-process" "${common[@]}"
printf '\n== eight processes, shardcast ==\n'
"$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=8 \
    launch/train_hybrid.py --tp 2 --pp 2 --dp 2 --output "$output/tp2-pp2-dp2" "${common[@]}"
printf '\n== comparison ==\n'
"$python" launch/train_hybrid.py --output "$output" \
    --compare "$output/one-process" "$output/tp2-pp2-dp2"
