# For the other scripts to source: sets up Python for this checkout.
#
# environment EXTRA  sets $python to an interpreter that has the requirements of EXTRA (an extra of
#                    setup.cfg) at the versions of constraints.txt. It reuses $VENV, the active
#                    virtual environment or .venv, whichever satisfies them first; otherwise it
#                    installs into $VENV (default: .venv), creating it with $PYTHON.
# on_path COMMAND    puts $VENV or .venv on the PATH, if COMMAND is only there.
# has_gpu            fails if the PATH's Python has torch and finds no GPU.
# usage "$@"         prints the comment at the top of the calling script and exits, if the first
#                    argument is --help or -h.
#
# Packages come from the indexes in pip's own settings. On Linux the default torch wheel brings
# several GB of CUDA libraries; add an index with CPU builds of torch to pip's settings to avoid that.

usage() {
    [[ ${1:-} == --help || ${1:-} == -h ]] || return 0
    sed -n '2,/^set /s/^# \{0,1\}//p' "launch/${0##*/}"
    exit
}

environment() {
    local extra=$1 venv
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    # matplotlib keeps files in the home directory, and complains if it cannot write there.
    [[ -w ${HOME:-} ]] || export MPLCONFIGDIR=${MPLCONFIGDIR:-${TMPDIR:-/tmp}/matplotlib-$UID}
    for venv in "${VENV:-}" "${VIRTUAL_ENV:-}" .venv; do
        python=$venv/bin/python
        if [[ -n $venv && -x $python ]] && "$python" launch/satisfied.py "$extra"; then
            echo "using the virtual environment $venv"
            return
        fi
    done
    venv=${VENV:-.venv}
    python=$venv/bin/python
    has_pip "$python" || make_venv "$venv"
    "$python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
        --constraint constraints.txt --editable ".[$extra]"
    # Compile on all cores; pip uses one. Some packages have files for another Python, which fail.
    "$python" -m compileall -q -j 0 \
        "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null || true
}

on_path() {
    local bin
    bin=$(realpath -m "${VENV:-.venv}")/bin
    command -v "$1" >/dev/null || [[ ! -x $bin/$1 ]] || PATH=$bin:$PATH
}

has_gpu() {
    [[ $(python -c "import torch; print(torch.cuda.is_available())" 2>/dev/null) != False ]]
}

has_pip() { "$1" -m pip --version >/dev/null 2>&1; }

# make_venv FOLDER  a virtual environment of $found, as find_python sets it.
make_venv() {
    find_python
    echo "creating the virtual environment $1 with $("$found" --version)"
    "$found" -m venv "$1" && return
    echo "error: $found cannot create virtual environments; on Debian and Ubuntu: apt install" \
        "python3-venv; or name another Python with PYTHON=/path/to/python" >&2
    return 1
}

# Prints version and path of each Python >= 3.11 on this machine, the oldest first.
pythons() {
    local name path told='import sys; v = sys.version_info; v >= (3, 11) or sys.exit(1)
print(*v[:3], sep=".", end=" "); print(sys.executable)'
    for name in ${PYTHON:+"$PYTHON"} python3 python3.{11..19} "$(command -pv python3)"; do
        "$name" -c "$told" 2>/dev/null || true
    done | sort --version-sort | awk '!seen[$1]++'
}

# Sets $found to the first Python 3.11 or newer.
find_python() {
    local others=(python3 python3.14 python3.13 python3.12 python3.11 python)
    for found in ${PYTHON:+"$PYTHON"} "${others[@]}"; do
        if "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python" >&2
    return 1
}
