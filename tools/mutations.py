"""Break the core in one place at a time, and see which test fails: ``python tools/mutations.py``.

Each block of ``mutations.txt`` is one mistake. It is made in a copy of the working tree, and its
tests run until the first failure. If a mutation survives, a test is missing.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BAD = ("| SURVIVED", "| STALE", "| BROKEN", "| UNDECIDED")
DATA = Path(__file__).with_suffix(".txt")


class Mutation(NamedTuple):
    """One mistake.

    Attributes:
        name: a short description.
        file: below ``shardcast/``; its only occurrence of ``old`` becomes ``new``.
        tests: tests below ``tests/`` that should fail first, or ``-k`` and a word.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutations() -> list[Mutation]:
    """Read the table: blocks of a name, a file, tests, and texts before and after a line ``=>``."""
    found = []
    for block in DATA.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        name, file, tests, *text = lines
        arrow = text.index("=>")
        old, new = "\n".join(text[:arrow]), "\n".join(text[arrow + 1 :])
        found.append(Mutation(name, file, old, new, tuple(tests.split())))
    return found


def copied() -> Path:
    """Copy the working tree into a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="mutations-")) / ROOT.name
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


class Noticed:
    """A plugin that keeps the name of the first test that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._path.write_text(f"BROKEN: {report.nodeid} cannot be imported")


def ended(folder: Path, tests: tuple[str, ...], limit: float) -> str:
    """Run tests in a copy, in a fork of this process.

    Returns:
        The test that failed, ``""`` if none did, or the reason in capitals if that is unknown.
    """
    noticed = folder / "noticed"
    noticed.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        words = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *(f"tests/{t}" if ".py" in t else t for t in tests),
        ]
        status = pytest.main(words, plugins=[Noticed(noticed)])
        os._exit(int(status))
    since = time.monotonic()
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() - since > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "UNDECIDED: time limit"  # under load a survivor may take as long
        time.sleep(0.1)
    if noticed.exists():
        return noticed.read_text()
    status = os.waitstatus_to_exitcode(done[1])
    if status in (4, 5):  # pytest: a wrong name, or no test matches the word
        return "BROKEN: there is no such test"
    return f"UNDECIDED: status {status}" if status else ""


def tried(mutation: Mutation, folder: Path, limit: float) -> str:
    """Return a row of the table."""
    path = folder / "shardcast" / mutation.file
    before = path.read_text()
    if before.count(mutation.old) != 1:
        return "STALE: its text is not there once"
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        return ended(folder, mutation.tests, limit) or "SURVIVED"
    finally:
        path.write_text(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutations with one of these in their name")
    parser.add_argument("-j", type=int, default=1, help="mutations at a time")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each")
    args = parser.parse_args()
    for name in ("torch._dynamo", "torch.distributed.checkpoint", "pytest", "hypothesis"):
        try:
            __import__(name)  # once instead of in each fork
        except ImportError:
            continue
    left: queue.Queue[Mutation] = queue.Queue()
    for mutation in mutations():
        if not args.words or any(word in mutation.name for word in args.words):
            left.put(mutation)
    rows: list[str] = []

    def work() -> None:
        folder = copied()
        while not left.empty():
            mutation = left.get()
            rows.append(f"{mutation.name} | {tried(mutation, folder, args.limit)}")
            print(rows[-1], flush=True)
        shutil.rmtree(folder.parent)

    threads = [threading.Thread(target=work) for _ in range(args.j)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [row for row in rows if any(word in row for word in BAD)]
    print(f"{len(rows)} mutations, {len(failed)} of them not noticed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
