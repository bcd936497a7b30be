"""Run the parts one after the other, each in a process and with a time limit of its own.

A part that fails, hangs or kills its process is reported, with what it had found until then; the
next one runs all the same.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imported here, so that the parts, which are forked, need not do it again. Nothing in this process
# may ask for a device: a forked process cannot use CUDA once its parent has.
import torch

import shardcast  # noqa: F401
from gpu.bench import Bench
from gpu.report import Result, write

PARTS = {  # module: seconds that it may take; nine minutes together
    "environment": 25,
    "cuda_tests": 120,
    "step_profile": 60,
    "bandwidth": 80,
    "end_to_end": 100,
    "memory": 45,
    "forms": 50,
    "peers": 60,
}


def work(name: str, dry: bool, path: Path) -> None:
    """The body of a part's process."""
    os.setsid()  # what it starts ends with it
    try:
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; without one only --dry-run works")
        if dry:
            torch.set_num_threads(1)
        importlib.import_module(f"gpu.{name}").run(Bench(dry, path))
    except BaseException:
        path.with_suffix(".error").write_text(traceback.format_exc())
        sys.exit(1)


def run(name: str, dry: bool, folder: Path, limit: float) -> Result:
    """One part; never raises for what happens in it."""
    path = folder / f"{name}.json"
    for old in (path, path.with_suffix(".error")):
        old.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=work, args=(name, dry, path))
    start = time.monotonic()
    process.start()
    process.join(limit)
    error = None
    if process.is_alive():
        error = f"was stopped after {limit:.0f} seconds"
    end(process)
    told = path.with_suffix(".error")
    if error is None and process.exitcode:
        error = told.read_text() if told.exists() else f"its process ended with {process.exitcode}"
    figures: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return Result(name, time.monotonic() - start, figures, error)


def end(process: BaseProcess) -> None:
    """End a part and whatever it started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended with everything that it started
        pass
    except PermissionError:  # macOS: only a zombie is left of the group
        pass
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/gpu.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with tiny sizes")
    parser.add_argument("--output", type=Path, default=Path("gpu-report"))
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; expected some of {list(PARTS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    results = []
    for name, limit in PARTS.items():
        if not args.parts or name in args.parts:
            # A dry run is no measurement, and may share its cores with others.
            result = run(name, args.dry_run, args.output, 3 * limit if args.dry_run else limit)
            results.append(result)
            print(f"{name}: {result.verdict}, {result.seconds:.1f} s", flush=True)
            write(args.output, results, args.dry_run)
    print(f"written: {args.output / 'report.md'}")
    sys.exit(any(result.error for result in results))


if __name__ == "__main__":
    main()
