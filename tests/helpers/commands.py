"""Commands in their own processes, which are all killed when the test ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import warm
from patience import patience

ROOT = Path(__file__).parents[2]
TORCHRUN = (
    *("-m", "torch.distributed.run"),
    *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
)


def python(*arguments: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a warm Python with ``arguments`` in the checkout; see :func:`command`."""
    return command(warm.executable(), *arguments, timeout=timeout, **env)


def command(*words: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``words`` in the checkout, without environment variables of shardcast and Accelerate.

    Raises:
        subprocess.TimeoutExpired: the process and all that it had started were killed.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDCAST_", "ACCELERATE_"))}
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with killed_at_last(process):
        out, errors = process.communicate(timeout=patience(timeout))
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


@contextmanager
def killed_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill ``process`` and its descendants at the end if it still runs."""
    try:
        yield
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants; torchrun gives each worker its own session."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
