#!/usr/bin/env bash
# Build the documentation site, build/site, from docs/, README.md, examples/ and docstrings. A broken
# link or anchor, a page missing in mkdocs.yml, and an option or public name missing on the API pages
# are errors. Installs MkDocs into .venv-docs (50 MB, once) and needs no torch.
#
# Usage: bash launch/docs.sh [serve]   (serve: on http://127.0.0.1:8000, rebuilt at each change)
# Environment: PYTHON (see environment.sh), DOCS_VENV (default: .venv-docs)
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
usage "$@"

venv=${DOCS_VENV:-.venv-docs}
if ! cmp --silent tools/site/requirements.txt "$venv/requirements.txt"; then
    has_pip "$venv/bin/python" || make_venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
        --requirement tools/site/requirements.txt
    cp tools/site/requirements.txt "$venv/requirements.txt"
fi
export NO_MKDOCS_2_WARNING=1 # the theme warns about versions that are not used here
PATH=$(cd "$venv/bin" && pwd):$PATH # signatures are formatted by its ruff
exec "$venv/bin/python" -m mkdocs "${1:-build}"
