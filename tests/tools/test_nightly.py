"""The nightly run: every part is run, and one table says what came of each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("status", [0, 1])
def test_a_part_that_fails_fails_the_run_after_the_others(tmp_path: Path, status: int) -> None:
    for name in ("test.sh", "environment.sh"):
        (tmp_path / "launch").mkdir(exist_ok=True)
        shutil.copy(LAUNCH / name, tmp_path / "launch")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/machines.sh").write_text(
        'echo "$STORIES_SEED $SWEEPS"; echo "= 3 passed, 1 skipped in 2.00s ="; '
        f"[ -e ran ] || {{ touch ran; exit {status}; }}\n"
    )
    ended = subprocess.run(
        ["bash", "launch/test.sh", "--nightly", "machines", "machines"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "STORIES_SEED": "7", "SWEEPS": "as it was"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status, ended.stderr
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ma")]
    assert [row[1] for row in rows] == [("ok", "FAILED")[status], "ok"], ended.stdout
    assert [row[2] for row in rows] == ["3 passed, 1 skipped"] * 2
    assert "STORIES_SEED=7" in ended.stdout
    assert (tmp_path / "nightly-report/machines.log").read_text().startswith("7 as it was\n")


def test_a_part_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(LAUNCH, tmp_path / "launch")
    command = ["bash", "launch/test.sh", "--nightly", "mashines"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "mashines is no part" in ended.stderr
