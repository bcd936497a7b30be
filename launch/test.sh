#!/usr/bin/env bash
# Set up a virtual environment where there is none, then check style, types and behaviour; without
# arguments also that the site builds (launch/docs.sh).
#
# Usage: bash launch/test.sh [arguments of pytest]
#        bash launch/test.sh --codegen [arguments of launch/codegen]
#        bash launch/test.sh --versions [arguments of pytest]
#        bash launch/test.sh --ecosystem [arguments of pytest]
# Environment: VENV, PYTHON (see environment.sh)
#
# With --codegen: look at the kernels that a GPU would run, without one. It makes a virtual
# environment of its own, .venv-cuda or $VENV, for the CUDA wheel of torch, which takes 6 GB.
#
# With --versions: run the tests with the oldest torch that is supported and with the newest one
# known, in .venv-torch-* of their own, 6 GB each. Privates of torch differ most between these.
#
# With --ecosystem: train with scripts of third-party packages beside DDP, in .venv-ecosystem or
# $VENV of its own (2 GB), and write docs/tested-scripts.md. Ten minutes on two cores; -k NAME for a part.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

if [[ ${1:-} == --codegen ]]; then
    shift
    python=${VENV:-.venv-cuda}/bin/python
    if ! "$python" -c 'import accelerate, triton, torch; assert torch.version.cuda' 2>/dev/null; then
        has_pip "$python" || make_venv "${python%/bin/python}"
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --requirement launch/codegen/requirements.txt
    fi
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
    exec "$python" launch/codegen "$@"
fi
if [[ ${1:-} == --versions ]]; then
    shift
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    failed=()
    for version in 2.11.0 2.15.0; do
        venv=.venv-torch-$version
        python=$venv/bin/python
        tried="import lightning, pytest, torch; assert torch.__version__.startswith('$version')"
        if ! "$python" -c "$tried" 2>/dev/null; then
            has_pip "$python" || make_venv "$venv"
            grep --invert-match --extended-regexp '^(torch|setuptools)==' constraints.txt \
                >"$venv/constraints.txt"
            "$python" -m pip install --disable-pip-version-check --progress-bar off \
                --constraint "$venv/constraints.txt" "torch==$version" --editable ".[test]"
        fi
        "$python" -m pytest --numprocesses=auto "$@" || failed+=("$version")
    done
    echo "failed with torch: ${failed[*]:-none}"
    exit "${#failed[@]}"
fi
if [[ ${1:-} == --ecosystem ]]; then
    shift
    venv=${VENV:-.venv-ecosystem}
    python=$venv/bin/python
    if ! cmp --silent tests/ecosystem/requirements.txt "$venv/requirements.txt"; then
        has_pip "$python" || make_venv "$venv"
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --constraint constraints.txt --requirement tests/ecosystem/requirements.txt
        cp tests/ecosystem/requirements.txt "$venv/requirements.txt"
    fi
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    (($#)) || set -- --recipes docs/tested-scripts.md
    exec "$python" -m pytest tests/ecosystem "$@"
fi
environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests start several processes
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict shardcast
(($#)) || bash launch/docs.sh
"$python" -m pytest --numprocesses=auto "$@"
