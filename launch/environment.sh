# For the other scripts to source: sets up Python for this checkout.
#
# environment EXTRA  sets $python to an interpreter that has the requirements of EXTRA (an extra of
#                    setup.cfg) at the versions of constraints.txt. It reuses $VENV, the active
#                    virtual environment or .venv, whichever satisfies them first; otherwise it
#                    installs into $VENV (default: .venv), creating it with $PYTHON.
#
# Where packages come from is left to pip's own settings. On Linux the plain torch wheel brings
# several GB of CUDA libraries; an index with CPU builds of torch, added to pip's, avoids that.

environment() {
    local extra=$1 venv
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    for venv in "${VENV:-}" "${VIRTUAL_ENV:-}" .venv; do
        python=$venv/bin/python
        if [[ -n $venv && -x $python ]] && "$python" launch/satisfied.py "$extra"; then
            echo "using the virtual environment $venv"
            return
        fi
    done
    venv=${VENV:-.venv}
    python=$venv/bin/python
    if [[ ! -x $python ]]; then
        find_python
        echo "creating the virtual environment $venv with $("$found" --version)"
        "$found" -m venv "$venv"
    fi
    "$python" -m pip install --disable-pip-version-check --progress-bar off \
        --constraint constraints.txt --editable ".[$extra]"
}

# Sets $found to the first Python 3.10 or newer.
find_python() {
    for found in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$found" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            return
        fi
    done
    echo "error: Python 3.10 or newer is needed; name one with PYTHON=/path/to/python" >&2
    return 1
}
