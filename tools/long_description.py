"""Write the long description of a source tree before its build, without relative links.

Usage: python tools/long_description.py TREE [URL]
"""

import re
import sys
from pathlib import Path

FILE = "LONG_DESCRIPTION.md"
RELATIVE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")
PICTURE = re.compile(r"!\[([^\]]+)\]\((?!https?://)([^)]+)\)")
# Replace commands that install from a clone by those that install from an index.
INSTALLS = {
    r"^pip install \. +#.*": "pip install shardcast-optim",
    r"(?<=')\.(?=\[\w+\]')": "shardcast-optim",
}


def without_relative_links(text: str, url: str) -> str:
    """Return Markdown whose relative links and pictures point to `url`.

    If `url` is empty, links become plain text and pictures are removed.
    """
    text = PICTURE.sub(rf"![\1]({url.rstrip('/')}/raw/main/\2)" if url else "", text)
    if url:
        return RELATIVE.sub(rf"[\1]({url.rstrip('/')}/blob/main/\2)", text)
    return RELATIVE.sub(r"\1", text)


def prepare(tree: Path, url: str) -> None:
    text = without_relative_links((tree / "README.md").read_text(encoding="utf-8"), url)
    for of_a_clone, of_a_distribution in INSTALLS.items():
        text, found = re.subn(of_a_clone, of_a_distribution, text, flags=re.MULTILINE)
        if not found:
            raise SystemExit(f"error: README.md has no line like {of_a_clone!r}")
    (tree / FILE).write_text(text, encoding="utf-8")
    setup = (tree / "setup.cfg").read_text(encoding="utf-8")
    wanted = f"long_description = file: {FILE}\n"
    if url:
        wanted += f"url = {url}\nproject_urls =\n"
        wanted += f"    Documentation = {url}/blob/main/docs\n"
        wanted += f"    Changelog = {url}/blob/main/CHANGELOG.md\n"
        wanted += f"    Issues = {url}/issues\n    Source = {url}\n"
    changed = setup.replace("long_description = file: README.md\n", wanted)
    if changed == setup:
        raise SystemExit("error: setup.cfg does not name README.md as its long description")
    (tree / "setup.cfg").write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
