#!/usr/bin/env bash
# Prove that a run keeps its bits as its number of processes changes: launch/train.py is killed at 4
# processes and goes on with 2, then 1, then 4, and must end with the digest of a run that was left
# alone with 2. Takes two minutes on two cores.
#
# Usage: bash launch/prove_reproducible.sh [further flags of launch/train.py]
set -euo pipefail
cd "$(dirname "$0")/.."
export SHARDCAST_CONFIG=${SHARDCAST_CONFIG:-configs/bf16.yaml} OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
flags=(
    --device cpu --reproducible 8 --steps 100 --warmup-steps 2 --width 32 --depth 1 --heads 2
    --context 32 --batch-size 2 --corpus-mb 1 --max-grad-norm 1 --validation-interval 100
    --validation-sequences 8 --sample-bytes 8 --log-interval 1 --checkpoint-interval 5
)

# train PROCESSES NAME [until STEP]: a session of its own, so that all of it can be killed.
train() {
    local processes=$1 name=$2 until=${3:-}
    setsid torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$processes" \
        launch/train.py "${flags[@]}" --output "$folder/$name" \
        --checkpoint-dir "$folder/$name/saved" "${more[@]}" \
        >>"$folder/$name.log" 2>&1 &
    local agent=$!
    if [[ -n $until ]]; then
        while [[ ! -d $folder/$name/saved/$(printf "step-%09d" "$until") ]]; do
            kill -0 "$agent" || { cat "$folder/$name.log" && exit 1; }
            sleep 0.05
        done
        kill -KILL -- "-$agent"
        wait "$agent" 2>/dev/null || true
        echo "$name: killed at $processes processes after step $until"
    else
        wait "$agent" || { cat "$folder/$name.log" && exit 1; }
        echo "$name: ended at $processes processes"
    fi
}

more=("$@")
train 2 undisturbed
train 4 disturbed 25
train 2 disturbed 50
train 1 disturbed 75
train 4 disturbed
digest() { grep --only-matching "digest [0-9a-f]*" "$folder/$1.log" | tail --lines=1; }
echo "undisturbed: $(digest undisturbed)"
echo "disturbed:   $(digest disturbed)"
[[ -n $(digest undisturbed) && $(digest undisturbed) == "$(digest disturbed)" ]]
