"""Measure the tables of BENCHMARKS.md again.

Each command before a table is run. Its output replaces the table, with a line that names the
machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# A paragraph that begins with a command and a colon, and the table under it.
TABLE = re.compile(r"^`python (-m benchmarks [^`]+)`: (?:.+\n)+\n(?:\|.*\n)+", re.MULTILINE)
BUSY = " --clock processor"  # less wrong on a busy machine


def commands(text: str, parts: Sequence[str], idle: bool) -> list[tuple[str, str]]:
    """Return each paragraph with its table, and its command, in the document's order.

    Args:
        parts: if any are given, only commands that contain one of them.
        idle: measure by the wall clock everywhere, even if the document has processor time.
    """
    found = [
        (match[0], match[1].replace(BUSY if idle else "\0", "")) for match in TABLE.finditer(text)
    ]
    return [(old, run) for old, run in found if not parts or any(part in run for part in parts)]


def written(command: str, printed: str) -> str:
    """Return the paragraph and the table for the output of ``command``."""
    lines = printed.splitlines()
    facts = dict(line.split(": ", 1) for line in lines if line.startswith(("device: ", "torch: ")))
    title = lines[lines.index(f"device: {facts['device']}") - 2]
    about = f"`python {command}`: {title}; {facts['device']}, torch {facts['torch']}."
    return "\n".join([about, "", *(line for line in lines if line.startswith("|")), ""])


def measure(path: Path, minutes: float, parts: Sequence[str], idle: bool) -> None:
    """Run the commands of the document at ``path`` until the time is over.

    Each table is written when its command ends.
    """
    root, end = Path(__file__).parents[1], time.monotonic() + 60 * minutes
    for old, command in commands(path.read_text(), parts, idle):
        start = time.monotonic()
        try:
            printed = subprocess.run(
                [sys.executable, *shlex.split(command)],
                cwd=root,
                check=True,
                text=True,
                stdout=subprocess.PIPE,
                timeout=max(1.0, end - start),
            ).stdout
            path.write_text(path.read_text().replace(old, written(command, printed)))
            result = "written"
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            result = f"NOT written: {error}"
        print(f"{time.monotonic() - start:5.0f} s  {command}  {result}", flush=True)
    print(f"the text around the tables of {path.name} was not checked")
