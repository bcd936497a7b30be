#!/usr/bin/env bash
# Check style, types and behavior, after setting up a virtual environment if there is none. Without
# arguments, also build the site (launch/docs.sh).
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
# With --torch: run only the tests, with this torch on $PYTHON (or the first Python found), in
# .venv-torch-VERSION.
#
# With --versions: run the tests with the oldest supported torch on this machine's oldest Python, and
# with the newest torch on its newest Python, also with Triton for the tests of generated kernels. Run
# the adapters' tests with the oldest Accelerate, transformers and Lightning. Each run has its own
# .venv-torch-* or .venv-frameworks (6 GB).
#
# With --ecosystem: compare scripts of third-party packages with DDP, in .venv-ecosystem or $VENV
# (3 GB), and write the results to docs/tested-scripts.md. -k NAME runs a part, -k shipped the loops
# that packages ship. They include nanoGPT's published loss if DIR has its files, see --foreign.
#
# With --foreign: run other libraries' own tests, in .venv-foreign or $VENV (3 GB), and write
# docs/evidence.md. Files that no installed package has come from DIR, which has one folder for each
# repository in docs/evidence.md, at the commit given there. If a folder is missing, its tests are
# skipped and keep their rows.
#
# With --nightly: run the parts that a pull request does not wait for, and print one table. The parts
# are tests (whole sweeps, new random stories), versions, machines (tools/machines.sh), ecosystem and
# foreign; the default is all. Logs are in nightly-report/. STORIES_SEED repeats a night's stories.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"

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
        *) echo "error: $part is not a part of the nightly run" >&2 && exit 2 ;;
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
# run_with VENV PYTHON TESTS REQUIREMENT...  runs tests in their own environment, and notes a failure.
run_with() {
    local venv=$1 python=$1/bin/python found=$2 tests=$3 wanted
    shift 3
    wanted="$("$found" --version) $*"
    if [[ $(cat "$venv/wanted" 2>/dev/null) != "$wanted" ]]; then
        rm -rf "$venv"
        "$found" -m venv "$venv"
        # With another torch all other versions stay; frameworks choose their own dependencies.
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
# The site is built at the same time, in its own environment.
site=
(($#)) || { bash launch/docs.sh & site=$!; }
environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests start several processes
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy --strict shardcast
[[ ${1:-} != --lint ]] || exit 0
[[ -z $site ]] || wait "$site" || { echo "error: the site was not built, see above" >&2 && exit 1; }
"$python" -m pytest --numprocesses=auto "$@"
