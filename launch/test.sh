#!/usr/bin/env bash
# Set up a virtual environment where there is none, then check style, types and behavior; without
# arguments also that the site builds (launch/docs.sh).
#
# Usage: bash launch/test.sh [arguments of pytest]
#        bash launch/test.sh --lint
#        bash launch/test.sh --torch VERSION [arguments of pytest]
#        bash launch/test.sh --versions [arguments of pytest]
#        bash launch/test.sh --ecosystem [--sources DIR] [arguments of pytest]
#        bash launch/test.sh --foreign [--sources DIR] [arguments of pytest]
#        bash launch/test.sh --nightly [--sources DIR] [PART ...]
# Environment: VENV, PYTHON (see environment.sh)
#
# With --lint: only ruff and mypy, as pre-commit and CI run them.
#
# With --torch: only the tests, with this torch on $PYTHON (or the first Python that is found), in
# .venv-torch-VERSION.
#
# With --versions: run the tests with the oldest torch that is supported on the oldest Python of this
# machine, and with the newest one known on the newest, where privates of torch differ most; there with
# Triton, which tests of generated kernels need. Those of adapters run with the oldest Accelerate,
# transformers and Lightning. Each has a .venv-torch-* or .venv-frameworks of its own, 6 GB.
#
# With --ecosystem: train with scripts of third-party packages beside DDP, in .venv-ecosystem or
# $VENV of its own (3 GB), and write what was run into docs/tested-scripts.md. -k NAME for a part,
# -k shipped for the loops that packages ship. nanoGPT's published loss is among them where DIR has
# its files, see --foreign.
#
# With --foreign: run the tests that others wrote for their libraries, and write docs/evidence.md. In
# .venv-foreign or $VENV of its own (3 GB). Files that no installed package has are taken from DIR,
# one folder for each repository that docs/evidence.md names, at the commit that it names; their
# tests are skipped where it is not there, and keep their rows.
#
# With --nightly: run what a pull request does not wait for, and print one table. The parts are
# tests (whole sweeps, other random stories), versions, machines (tools/machines.sh), ecosystem and
# foreign; all by default. Logs are in nightly-report/. STORIES_SEED repeats the stories of a night.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

if [[ ${1:-} == --nightly ]]; then
    shift
    sources=()
    if [[ ${1:-} == --sources ]]; then
        sources=(--sources "$2")
        shift 2
    fi
    export STORIES_SEED=${STORIES_SEED:-$(date +%Y%m%d)}
    rows=() failed=0
    rm -rf nightly-report
    mkdir nightly-report
    (($#)) || set -- tests versions machines ecosystem foreign
    for part in "$@"; do
        case $part in
        tests) command=(env SWEEPS=whole bash launch/test.sh) ;;
        versions) command=(bash launch/test.sh --versions) ;;
        machines) command=(bash tools/machines.sh) ;;
        ecosystem | foreign) command=(bash launch/test.sh "--$part" "${sources[@]}") ;;
        *) echo "error: $part is no part of the nightly run" >&2 && exit 2 ;;
        esac
        echo "== $part: ${command[*]} =="
        start=$SECONDS outcome=ok log=nightly-report/$part.log
        "${command[@]}" >"$log" 2>&1 </dev/null || { outcome=FAILED failed=1 && tail -n 40 "$log"; }
        counts=$(grep --only-matching --extended-regexp '[0-9]+ (passed|failed).* in [0-9]' "$log" |
            sed 's/ in [0-9]$//' | paste -s -d ";" || true)
        rows+=("| $part | $outcome | ${counts//;/; } | $((SECONDS - start)) s |")
    done
    printf '%s\n' "" "STORIES_SEED=$STORIES_SEED" "" "| part | outcome | tests | time |" \
        "|---|---|---|---:|" "${rows[@]}"
    exit "$failed"
fi
# run_with VENV PYTHON TESTS REQUIREMENT...  tests in an environment of its own; notes it if they fail.
run_with() {
    local venv=$1 python=$1/bin/python found=$2 tests=$3 wanted
    shift 3
    wanted="$("$found" --version) $*"
    if [[ $(cat "$venv/wanted" 2>/dev/null) != "$wanted" ]]; then
        rm -rf "$venv"
        "$found" -m venv "$venv"
        # Beside another torch all else is as ever; frameworks choose what they are with.
        local pinned=()
        if [[ $1 == torch==* && $* != *accelerate* ]]; then
            grep --invert-match --extended-regexp "^(setuptools|torch)==" \
                constraints.txt >"$venv/constraints.txt"
            pinned=(--constraint "$venv/constraints.txt")
        fi
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            "${pinned[@]}" "$@" --editable ".[test]"
        echo "$wanted" >"$venv/wanted"
    fi
    "$python" -m pytest --numprocesses=auto ${tests:+"$tests"} "${arguments[@]}" ||
        failed+=("$wanted;")
}
if [[ ${1:-} == --torch ]]; then
    version=${2:?the version of torch} failed=() arguments=("${@:3}")
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    find_python
    run_with ".venv-torch-$version" "$found" "" "torch==$version"
    exit "${#failed[@]}"
fi
if [[ ${1:-} == --versions ]]; then
    shift
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    failed=() arguments=("$@")
    oldest_python=$(pythons | head -n 1 | cut -d " " -f 2-)
    newest_python=$(pythons | tail -n 1 | cut -d " " -f 2-)
    oldest_frameworks=(accelerate==1.10.1 transformers==5.0.0 lightning==2.5.0)
    run_with .venv-torch-2.11.0 "$oldest_python" "" torch==2.11.0
    run_with .venv-torch-2.15.0 "$newest_python" "" torch==2.15.0 triton
    run_with .venv-frameworks "$oldest_python" tests/adapters torch==2.13.0 "${oldest_frameworks[@]}"
    echo "failed with: ${failed[*]:-none}"
    exit "${#failed[@]}"
fi
if [[ ${1:-} == --ecosystem ]]; then
    shift
    venv=${VENV:-.venv-ecosystem}
    python=$venv/bin/python
    wanted=$(cat tools/conformance/ecosystem/requirements.txt tools/conformance/ecosystem/shipped.txt)
    if [[ $(cat "$venv/wanted" 2>/dev/null) != "$wanted" ]]; then
        has_pip "$python" || make_venv "$venv"
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --constraint constraints.txt --requirement tools/conformance/ecosystem/requirements.txt
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --no-deps --requirement tools/conformance/ecosystem/shipped.txt
        echo "$wanted" >"$venv/wanted"
    fi
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$python" -m pytest tools/conformance/ecosystem tools/conformance/foreign/test_nanogpt.py \
        --recipes docs/tested-scripts.md --evidence docs/evidence.md "$@"
fi
if [[ ${1:-} == --foreign ]]; then
    shift
    venv=${VENV:-.venv-foreign}
    python=$venv/bin/python
    wanted=$(cat tools/conformance/foreign/requirements.txt)
    if [[ $(cat "$venv/wanted" 2>/dev/null) != "$wanted" ]]; then
        has_pip "$python" || make_venv "$venv"
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --constraint constraints.txt --requirement tools/conformance/foreign/requirements.txt
        echo "$wanted" >"$venv/wanted"
    fi
    export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$python" -m pytest tools/conformance/foreign --evidence docs/evidence.md "$@"
fi
# The site is built meanwhile, in an environment of its own.
site=
(($#)) || { bash launch/docs.sh & site=$!; }
environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests start several processes
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict shardcast
[[ ${1:-} != --lint ]] || exit 0
[[ -z $site ]] || wait "$site" || { echo "error: no site was built, see above" >&2 && exit 1; }
"$python" -m pytest --numprocesses=auto "$@"
