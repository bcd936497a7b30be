"""Part 2: the tests that need a GPU, one row per test. The dry run runs those that a CPU can."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.bench import Bench, read

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/cuda"
LIMIT = 60.0  # seconds per test; the first test imports a compiler
ENDS = (0, 1, 5)  # exit codes of pytest: all passed, some failed, none was left


def run(bench: Bench) -> None:
    """Run tests in one process; after a test that ends it, continue in another."""
    while _round(bench) not in ENDS:
        pass
    wrong = [row["test"] for row in bench.figures if row["result"] not in ("passed", "skipped")]
    if wrong:
        raise RuntimeError(f"not passed: {', '.join(wrong)}")


def _round(bench: Bench) -> int:
    """Run the tests without a row in a new process; return its exit code.

    Raises:
        RuntimeError: the process ended without running a test.
    """
    command = [sys.executable, "-m", "pytest", TESTS, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "gpu.watch", "-p", "no:timeout", "-o", "addopts=", f"--rootdir={ROOT}"]
    command += [f"--deselect={row['test']}" for row in bench.figures]
    with tempfile.TemporaryDirectory() as folder:
        stack = Path(folder) / "stack"
        environment = {
            **os.environ,
            "GPU_KIT_DEVICE": "cpu" if bench.dry else "cuda",
            "GPU_KIT_PART": str(bench.path),
            "GPU_KIT_STACK": str(stack),
            "GPU_KIT_LIMIT": str(3 * LIMIT if bench.dry else LIMIT),
        }
        told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        before, bench.figures = len(bench.figures), read(bench.path)
        if told.returncode in ENDS:
            return told.returncode
        if len(bench.figures) == before:
            raise RuntimeError(f"pytest ran no test: {told.stdout[-1500:]}{told.stderr[-500:]}")
        row = bench.figures[-1]
        if row["result"] == "begun":
            row["result"] = "crashed"
            where = stack.read_text() if stack.exists() else ""
            row["why"] = f"ended its process with {told.returncode}: {where or told.stderr}"[:600]
            bench.write()
        return told.returncode
