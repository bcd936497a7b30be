"""What tests/helpers/commands.py leaves behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from commands import command


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="it looks into /proc")
def test_a_command_that_runs_too_long_is_killed_with_workers_in_sessions_of_their_own(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pid"
    script = f"setsid bash -c 'echo $$ > {file}; sleep 300; true' & wait"
    with pytest.raises(subprocess.TimeoutExpired):
        command("bash", "-c", script, timeout=1)
    worker, deadline = int(file.read_text()), time.monotonic() + 20
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.01)  # a killed process ends a moment later
    assert not alive(worker)
