#!/usr/bin/env bash
# Measure shardcast on this machine's GPU in at most ten minutes; writes gpu-report/.
#
# Usage: bash launch/gpu.sh [--dry-run] [--output FOLDER] [PART ...]
#   PART  environment, peers, host, cuda_tests, step_profile, bandwidth, end_to_end, memory, forms or
#         offload (default: all)
# Environment: PYTHON (default: python or python3, whichever has torch)
#
# Needs torch >= 2.11 built for CUDA, accelerate and pytest; no internet, and nothing is installed.
# Pictures need matplotlib. With --dry-run every part runs on the CPU with tiny sizes. That shows that
# the programs work; its figures mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"
for python in ${PYTHON:+"$PYTHON"} python python3; do
    if "$python" -c 'import importlib.util as u; u.find_spec("torch") or exit(1)' 2>/dev/null; then
        break
    fi
done
export PYTHONPATH=$PWD:$PWD/launch${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m gpu "$@"
