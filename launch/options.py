"""Write docs/options.md from ShardcastConfig: python launch/options.py [--check]."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from shardcast import ShardcastConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

`python launch/options.py` writes this page from `ShardcastConfig`. Give an option as a keyword of
`shard()`, as `SHARDCAST_<OPTION>` in the environment, or in the YAML file that `SHARDCAST_CONFIG`
names; the first of these wins. Unknown names are errors.

| option | default | what it does |
|---|---|---|
"""


def page() -> str:
    """The whole page, a row per option in the order of the class."""
    defaults = ShardcastConfig().to_dict()
    rows = []
    for option in dataclasses.fields(ShardcastConfig):
        default = defaults[option.name]
        shown = json.dumps(default) if not isinstance(default, str) else default  # as in YAML
        text = option.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{option.name}` | `{shown}` | {text} |")
    return HEAD + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    if arguments == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
