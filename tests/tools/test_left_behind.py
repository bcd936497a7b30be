"""A test run leaves no temporary files, even if it is interrupted or killed."""

import time
from pathlib import Path

import pytest
from commands import ROOT, python
from patience import patience

MODULE = """
import os, subprocess, tempfile

def test_that_leaves_folders():
    tempfile.mkdtemp()
    subprocess.run(["mktemp", "-d"], check=True)
    assert len(os.listdir(os.environ["TMPDIR"])) == 2
    {end}
"""


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"])
def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, end: str) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    module = tmp_path / "test_leaves.py"
    module.write_text(MODULE.format(end=end))
    variables = {
        "TMPDIR": str(outer),
        "PYTEST_DEBUG_TEMPROOT": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers",
    }
    words = ("-m", "pytest", "-c", "setup.cfg", "-p", "shared_fixtures", "-p", "no:cacheprovider")
    done = python(*words, str(module), **variables)
    assert done.returncode == {"r": 2, "o": -9}[end[0]], done.stdout + done.stderr
    until = time.monotonic() + patience(10.0)
    while [*outer.iterdir()] and time.monotonic() < until:
        time.sleep(0.05)
    assert not [*outer.iterdir()]
