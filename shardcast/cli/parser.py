"""The parser of every command."""

from __future__ import annotations

import argparse
from typing import Any


class Parser(argparse.ArgumentParser):
    """Shows defaults in ``--help``, and takes ``--world-size`` for ``--world_size``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument; see ``argparse``."""
        dashed = [name.replace("_", "-") for name in names if name[:2] == "--" and "_" in name]
        default, text = options.get("default"), options.get("help", "")
        if text and default not in (None, False, argparse.SUPPRESS) and "default" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            options["help"] = f"{text} (default: {shown})"
        return super().add_argument(*names, *dashed, **options)
