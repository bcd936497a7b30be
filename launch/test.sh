#!/usr/bin/env bash
# Set up a virtual environment where there is none, then check style, types and behaviour.
#
# Usage: bash launch/test.sh [arguments of pytest]
# Environment: VENV, PYTHON (see environment.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests start several processes
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict shardcast
"$python" -m pytest --numprocesses=auto "$@"
