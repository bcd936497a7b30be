#!/usr/bin/env bash
# Build the source distribution and the wheel of HEAD, try each in a clean environment, and run the
# two commands of the README from the unpacked source distribution.
#
# Usage: bash tools/release.sh [--quick]   (--quick: 20 steps, and a few of the tests)
# Environment:
#   OUTPUT       where the distributions go (default: dist)
#   PROJECT_URL  address of the repository, for relative links of the long description, which are
#                plain text without it. CI sets it; a fork needs no other setting
#   VENV, PYTHON see environment.sh; a $VENV with the requirements of the extra `test` is reused
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
output=$(mkdir -p "${OUTPUT:-dist}" && cd "${OUTPUT:-dist}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[[ -z ${VENV:-} ]] || export VENV=$(realpath -m "$VENV")

find_python
"$found" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --disable-pip-version-check --quiet build twine
mkdir "$work/tree" "$work/unpacked"
git archive HEAD | tar -x -C "$work/tree"
"$work/venv/bin/python" tools/long_description.py "$work/tree" "${PROJECT_URL:-}"
"$work/venv/bin/python" -m build --outdir "$output" "$work/tree"
wheel=$(ls -t "$output"/*.whl | head -n 1)
sdist=$(ls -t "$output"/*.tar.gz | head -n 1)
"$work/venv/bin/python" -m twine check --strict "$wheel" "$sdist"

"$found" -m venv "$work/empty"
for distribution in "$wheel" "$sdist"; do
    printf '\n== %s in an environment of its own ==\n' "$(basename "$distribution")"
    "$work/empty/bin/python" -m pip install --disable-pip-version-check --quiet \
        --constraint constraints.txt --force-reinstall --no-deps "$distribution"
    "$work/empty/bin/python" -m pip install --disable-pip-version-check --quiet \
        --constraint constraints.txt "$distribution" # what it needs
    (
        cd "$work/unpacked" # still empty, so that the installed package is imported
        unset PYTHONPATH
        "$work/empty/bin/python" -m pip --disable-pip-version-check check
        "$work/empty/bin/python" -c \
            "import pathlib, shardcast as s; pathlib.Path(s.__file__).with_name('py.typed').stat()"
        "$work/empty/bin/shardcast" env
        "$work/empty/bin/shardcast" test
    )
done

tar -x -z -C "$work/unpacked" --strip-components=1 -f "$sdist"
cd "$work/unpacked"
if [[ ${1:-} == --quick ]]; then
    bash launch/quickstart.sh --steps 20 --warmup-steps 2
    bash launch/test.sh tests/plan/test_layout.py tests/test_config.py tests/plan/test_precision.py
else
    bash launch/quickstart.sh
    bash launch/test.sh
fi
echo "built, and tried from the source distribution:"
ls -l "$output"
