"""Run the parts one after the other, each in its own process and with its own time limit.

If a part fails, hangs or kills its process, the report keeps its figures, and the next part runs.
The report is written while parts run, so it survives if this program or the machine stops.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

# Imported here, so that the parts, which are forked, need not do so again. This process must not
# use a device: a forked process cannot use CUDA after its parent has.
import torch

import shardcast  # noqa: F401
from gpu.bench import Bench, read
from gpu.report import Result, draw, write

PARTS = {  # module: seconds, ten minutes in total; a part may also use time left by earlier ones
    "environment": 25,
    "peers": 60,  # almost no time on one card
    "host": 60,
    "cuda_tests": 100,
    "step_profile": 60,
    "bandwidth": 70,
    "end_to_end": 90,
    "memory": 45,
    "forms": 50,
    "offload": 40,
}
LOOK = 2.0  # seconds between reads of a running part's figures


def work(name: str, dry: bool, path: Path, until: float) -> None:
    """Run a part, in its own process."""
    os.setsid()  # so that processes that it starts end with it
    try:
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; without one only --dry-run works")
        if dry:
            torch.set_num_threads(1)
        importlib.import_module(f"gpu.{name}").run(Bench(dry, path, until=until))
    except BaseException:
        path.with_suffix(".error").write_text(traceback.format_exc())
        sys.exit(1)


def run(
    name: str,
    dry: bool,
    folder: Path,
    limit: float,
    seen: Callable[[Result], object] = lambda _result: None,
) -> Result:
    """Run one part; its errors are returned, not raised.

    Args:
        folder: folder of the part's files.
        seen: called repeatedly with the result so far.
    """
    path = folder / f"{name}.json"
    for old in (path, path.with_suffix(".error")):
        old.unlink(missing_ok=True)
    start = time.monotonic()
    until = start + limit
    context = multiprocessing.get_context("fork")
    process = context.Process(target=work, args=(name, dry, path, until))
    process.start()
    while process.is_alive() and time.monotonic() < until:
        process.join(min(LOOK, max(0.0, until - time.monotonic())))
        so_far = f"is under way, with {max(0.0, until - time.monotonic()):.0f} seconds left"
        seen(Result(name, time.monotonic() - start, read(path), so_far))
    error = None
    if process.is_alive():
        error = f"was stopped after {limit:.0f} seconds"
    end(process)
    told = path.with_suffix(".error")
    if error is None and process.exitcode:
        error = told.read_text() if told.exists() else f"its process ended with {process.exitcode}"
    return Result(name, time.monotonic() - start, read(path), error)


def end(process: BaseProcess) -> None:
    """End a part and all processes that it started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        pass
    except PermissionError:  # macOS: only a zombie is left of the group
        pass
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/gpu.sh", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"parts to run (default: all): {', '.join(PARTS)}"
    )
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU with tiny sizes")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-report"), help="folder of the report"
    )
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; expected some of {list(PARTS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    # A dry run measures nothing and may share its cores, so it gets more time.
    seconds = {name: (3 if args.dry_run else 1) * PARTS[name] for name in PARTS}
    coming = [name for name in PARTS if not args.parts or name in args.parts]
    until = time.monotonic() + sum(seconds[name] for name in coming)
    results: list[Result] = []

    def seen(result: Result) -> None:
        write(args.output, [*results, result], args.dry_run)

    with tempfile.TemporaryDirectory() as folder:
        while coming:
            name = coming.pop(0)
            limit = until - time.monotonic() - sum(seconds[later] for later in coming)
            result = run(name, args.dry_run, Path(folder), limit, seen)
            results.append(result)
            print(f"{name}: {result.verdict}, {result.seconds:.1f} s", flush=True)
            write(args.output, results, args.dry_run)
            draw(args.output, results)
    print(f"written: {args.output / 'report.md'}")
    sys.exit(any(result.error for result in results))


if __name__ == "__main__":
    main()
