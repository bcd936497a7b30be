#!/usr/bin/env bash
# Try the two commands of README.md on the kinds of machine that this one can simulate: each installed
# Python, a path with a space, a user without root whose home is read-only, a host without network and
# with an unknown name, directories that cannot be flushed, no compiler, a CPU without AVX-512, one
# core. Prints a Markdown table. Kinds that cannot be simulated are skipped and listed.
#
# Usage: bash tools/machines.sh [--whole] [PART ...]   (only machines with a PART in their name)
#
# Each uses a fresh clone of HEAD. By default, 12 steps of the quickstart and a few test files run, two
# minutes per machine. With --whole, both commands run completely, in half an hour. Each
# Python gets its own virtual environment, .venv-python-*, of 1 to 6 GB.
# Environment: VENV, PYTHON (see environment.sh), for the machines that do not vary Python
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

STEPS=(--steps 12 --warmup-steps 2 --corpus-mb 2 --validation-sequences 32 --sample-bytes 40)
TESTS=(
    tests/checkpoint/test_checkpoint_refusals.py tests/hybrid/test_pipeline_script.py
    tests/optimizer/test_forwards.py tests/step/test_compiling.py tests/test_compat.py
    tests/launch/test_launch.py::test_two_processes_follow_the_ddp_baseline
)
form="in brief"
if [[ ${1:-} == --whole ]]; then
    shift
    form=whole STEPS=() TESTS=()
fi
parts=("$@")
if [[ $form == whole ]]; then
    export DOCS_VENV=$PWD/.venv-docs
    bash launch/docs.sh # installs its requirements now; a machine without network could not
fi
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=() failed=0

# wanted NAME  succeeds if NAME contains one of the given parts, or if none were given.
wanted() {
    local part
    ((${#parts[@]})) || return 0
    for part in "${parts[@]}"; do
        [[ $1 != *"$part"* ]] || return 0
    done
    return 1
}

row() { rows+=("| $1 | $2 | $3 |") && echo "$1: $2, $3"; }

# try NAME FOLDER VENV COMMAND...  runs both commands in a clone in FOLDER, each through COMMAND.
try() {
    local name=$1 folder=$2 venv=$3 log results=() command
    shift 3
    log=$work/log
    wanted "$name" || return 0
    echo "== $name =="
    mkdir -p "$(dirname "$folder")"
    git clone --quiet "$root" "$folder"
    [[ $name != *"without root"* ]] || chown -R nobody "$folder"
    for command in "quickstart.sh ${STEPS[*]}" "test.sh ${TESTS[*]}"; do
        local start=$SECONDS
        # shellcheck disable=SC2086 # our own words, without spaces
        if (cd "$folder" && env -u VIRTUAL_ENV -u PYTHONPATH -u OMP_NUM_THREADS VENV="$venv" \
            "$@" bash launch/$command) >"$log" 2>&1 </dev/null; then
            results+=("$(grep --only-matching --extended-regexp '[0-9]+ passed.*' "$log" |
                tail -n 1 | grep --only-matching --extended-regexp '[0-9]+ (passed|skipped)' |
                paste -s -d , || true)")
            results[-1]="ok${results[-1]:+: ${results[-1]//,/, }}, $((SECONDS - start)) s"
        else
            results+=("FAILED, $((SECONDS - start)) s")
            failed=1
            tail -n 40 "$log"
        fi
    done
    row "$name" "${results[0]}" "${results[1]}"
    rm -rf "$folder"
}

skip() { ! wanted "$1" || row "$1" "skipped" "$2"; }

while read -r version path; do
    PYTHON=$path try "Python $version" "$work/python" "$root/.venv-python-$version" env
done < <(pythons)

environment test
venv=$(cd "$(dirname "$python")/.." && pwd)
version=$("$python" -c 'import platform; print(platform.python_version())')
if wanted "a path with a space"; then
    mkdir -p "$work/a b"
    cp -a "$venv" "$work/a b/venv" # so that torch's path has a space too
    try "a path with a space" "$work/a b/clone" "$work/a b/venv" env
    rm -rf "$work/a b"
fi

mkdir -p --mode=555 "$work/home"
chmod 755 "$work"
nobody=(setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups)
if [[ $(id -u) != 0 ]] || ! command -v setpriv >/dev/null; then
    skip "a user without root, a read-only home" "needs root to become another user"
elif ! "${nobody[@]}" env "$python" -c "import torch" 2>/dev/null; then
    skip "a user without root, a read-only home" "another user cannot read $python; set VENV"
else
    try "a user without root, a read-only home" "$work/rootless" "$venv" \
        "${nobody[@]}" env HOME="$work/home" USER=nobody
fi

alone=(unshare --uts --net)
[[ $(id -u) == 0 ]] || alone+=(--user --map-root-user)
isolated='ip link set lo up && hostname nobody-knows-this && exec "$@"'
if "${alone[@]}" bash -c "$isolated" bash true 2>/dev/null; then
    try "no network, an unknown host name" "$work/alone" "$venv" \
        "${alone[@]}" bash -c "$isolated" bash
else
    skip "no network, an unknown host name" "namespaces, or ip, are not to be had"
fi

mkdir "$work/unflushed"
cat >"$work/unflushed/sitecustomize.py" <<'PYTHON'
import errno, os, stat

def fsync(fd, flush=os.fsync):
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return flush(fd)

os.fsync = fsync
PYTHON
try "directories that cannot be flushed" "$work/fsync" "$venv" env PYTHONPATH="$work/unflushed"

mkdir "$work/bin"
IFS=: read -r -a folders <<<"$PATH"
for folder in "${folders[@]}"; do # the first file of a name wins, as on the PATH
    find "$folder/" -maxdepth 1 ! -type d -executable 2>/dev/null |
        grep --invert-match --extended-regexp '/([^/]*-)?(cc|c\+\+|c89|c99|gcc|g\+\+|clang|clang\+\+)(-[0-9.]+)?$' |
        xargs --no-run-if-empty ln -s --target-directory="$work/bin" 2>/dev/null || true
done
try "no compiler" "$work/bare" "$venv" env -u CC -u CXX PATH="$work/bin"

try "a CPU without AVX-512" "$work/avx2" "$venv" env \
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
    TORCHINDUCTOR_CACHE_DIR="$work/avx2-kernels" # this CPU's kernels differ but have the same keys

if command -v taskset >/dev/null; then
    core=$(taskset -cp $$ | grep --only-matching --extended-regexp '[0-9]+' | tail -n 1)
    try "one core" "$work/core" "$venv" taskset -c "$core"
else
    skip "one core" "needs taskset"
fi

capability=$("$python" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')
printf '\n%s, %s, Python %s (unless said), %s cores, %s\n\n' \
    "$(date +%F)" "$(uname -sm)" "$version" "$(nproc)" "$capability"
printf '| machine | quickstart.sh, %s | test.sh, %s |\n|---|---|---|\n' "$form" "$form"
printf '%s\n' "${rows[@]}"
exit "$failed"
