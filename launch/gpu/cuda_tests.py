"""Part 2: the tests that need a GPU, one row per test. The dry run does what the CPU can do too."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu.bench import Bench

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 115.0  # seconds; a little less than the part's


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "timeout=0", "-o", "addopts=", f"--junitxml={path}"]
        environment = {**os.environ, "GPU_KIT_DEVICE": "cpu" if bench.dry else "cuda"}
        told = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=3 * LIMIT if bench.dry else LIMIT,
            capture_output=True,
            text=True,
        )
        if not path.exists():
            raise RuntimeError(
                f"pytest wrote no results: {told.stdout[-1500:]}{told.stderr[-500:]}"
            )
        for case in ElementTree.parse(path).iter("testcase"):
            result = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
            figure = {"test": case.get("name"), "seconds": case.get("time")}
            figure["result"] = "passed" if result is None else result.tag
            if result is not None:
                figure["why"] = (result.get("message") or "")[:300]
            bench.note(**figure)
    if told.returncode:
        raise RuntimeError(f"pytest: {told.stdout.strip().splitlines()[-1]}")
