"""The tables of BENCHMARKS.md anew: each command that stands before a table is run, and its table
takes the place of the one that was there, with a line that says on what it was measured.
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
BUSY = " --clock processor"  # what is less wrong beside other work


def commands(text: str, parts: Sequence[str], idle: bool) -> list[tuple[str, str]]:
    """Paragraph with table, and command, in the order of the document.

    Args:
        parts: only commands with one of them, if there are any.
        idle: whether times are to be of the wall also where they were of the processor.
    """
    found = [
        (match[0], match[1].replace(BUSY if idle else "\0", "")) for match in TABLE.finditer(text)
    ]
    return [(old, run) for old, run in found if not parts or any(part in run for part in parts)]


def written(command: str, printed: str) -> str:
    """The paragraph and the table of what ``command`` printed."""
    lines = printed.splitlines()
    facts = dict(line.split(": ", 1) for line in lines if line.startswith(("device: ", "torch: ")))
    title = lines[lines.index(f"device: {facts['device']}") - 2]
    about = f"`python {command}`: {title}; {facts['device']}, torch {facts['torch']}."
    return "\n".join([about, "", *(line for line in lines if line.startswith("|")), ""])


def measure(path: Path, minutes: float, parts: Sequence[str], idle: bool) -> None:
    """Run all commands of the document at ``path``, as many as the time allows; writes each table
    when it is there."""
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
    print(f"what is said beside the tables of {path.name} was not looked at")
