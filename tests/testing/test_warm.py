"""The Pythons that tests start programs with behave as new ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from commands import python

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="they are for Linux"),
]
FACTS = """
import json, os, sys
here = [name for name in sys.modules if name.split(".")[0] == "shardcast"]
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["MINE"], __name__, here, sys.path[:2]]))
print("error", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["-c", "-m", "a script", "unbuffered"])
def test_a_program_sees_what_it_would_see_in_a_new_python(how: str, tmp_path: Path):
    (script := tmp_path / "facts.py").write_text(FACTS)
    words = {"-c": ["-c", FACTS], "-m": ["-m", "facts"], "unbuffered": ["-u", str(script)]}
    found = [
        subprocess.run(
            [each, *words.get(how, [str(script)]), "--two", "words"],
            cwd=tmp_path,
            env={"PYTHONPATH": "/elsewhere", "MINE": "\u00e4", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        )
        for each in (warm.executable(), sys.executable)
    ]
    # Triton of torch 2.15 tells behind it what it leaks in a Python that has imported it.
    ours, expected = (
        (one.returncode, one.stdout, one.stderr.partition("nanobind: ")[0]) for one in found
    )
    assert ours == expected == (0, expected[1], "error\n")
    assert '"__main__", [], ' in ours[1]


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('so')", 1, "so"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import atexit; atexit.register(lambda: print('end')); 1 / 0", 1, "end"),
    ],
)
def test_it_ends_as_its_program_does(code: str, status: int, told: str):
    done = python("-c", code)
    assert done.returncode == status
    assert told in done.stdout + done.stderr


def begun(code: str) -> tuple[subprocess.Popen[str], int]:
    """A program that has printed its process."""
    words = [warm.executable(), "-c", f"import os, time\n{code}\nprint(os.getpid(), flush=True)\n"]
    words[-1] += "time.sleep(50)"
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_signal_reaches_it_and_who_is_killed_takes_it_along():
    told = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    process, _ = begun(told)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 7
    process, pid = begun("")
    os.kill(pid, 0)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    while Path(f"/proc/{pid}").exists():  # the time limit ends it
        time.sleep(0.01)
