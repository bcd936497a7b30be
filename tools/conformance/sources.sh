#!/usr/bin/env bash
# Get the files that launch/test.sh --foreign and --ecosystem read with --sources DIR: one folder for
# each repository in sources.txt, at its commit. Existing folders stay.
#
# Usage: bash tools/conformance/sources.sh DIR
# Environment: BASE, where the repositories are (default: https://github.com)
set -euo pipefail
list=$(dirname "$0")/sources.txt
base=${BASE:-https://github.com}
mkdir -p "${1:?a folder}"
into=$(cd "$1" && pwd)
while read -r repository commit; do
    [[ $repository != "#"* ]] || continue
    folder=$into/${repository#*/}
    [[ ! -e $folder ]] || continue
    git init --quiet "$folder.part"
    git -C "$folder.part" fetch --quiet --depth 1 "$base/$repository" "$commit"
    git -C "$folder.part" checkout --quiet FETCH_HEAD
    mv "$folder.part" "$folder"
done <"$list"
