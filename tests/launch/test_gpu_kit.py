"""``launch/gpu.sh``: its dry run on the CPU, and parts that fail, hang or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm
from commands import command
from gpu import __main__ as kit
from gpu import cuda_tests
from gpu.bench import Bench
from gpu.report import Result, write


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_dry_run_gives_figures_of_every_part_without_an_error(tmp_path: Path) -> None:
    words = ("bash", "launch/gpu.sh", "--dry-run", "--output", str(tmp_path))
    done = command(*words, timeout=400, PYTHON=warm.executable())
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert list(parts) == list(kit.PARTS)
    for name, part in parts.items():
        assert part["error"] is None, name
        assert part["figures"], name
        assert not [figure for figure in part["figures"] if "error" in figure], name
    results = [case["result"] for case in parts["cuda_tests"]["figures"]]
    assert results.count("passed") > 10 and set(results) == {"passed", "skipped"}
    ranks = parts["end_to_end"]["figures"][0]
    assert ranks["replicas equal"] is True
    compared = [row for row in parts["end_to_end"]["figures"] if "from plain" in row]
    assert [row["system"] for row in compared] == ["averaged", "sharded"]
    for row in compared:  # losses, distances from autocast, autocast's own spread
        losses, apart, yardstick = (
            [float(number) for number in row[key].split()]
            for key in ("losses", "from plain", "yardstick")
        )
        assert len(losses) == len(apart) == len(yardstick) == 11
        assert losses[0] > losses[-1] and 0 < max(yardstick) < 0.01
        assert max(apart) < 3 * max(yardstick), "a tiny model cannot diverge in ten steps"
    for figure in parts["memory"]["figures"]:
        assert figure["held / estimate"] == pytest.approx(1.0, abs=0.01)
    assert "figures mean nothing" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 3  # a borrowed machine returns only a few files


def part(monkeypatch: pytest.MonkeyPatch, body: Callable[[Bench], object]) -> None:
    """Add a part named ``broken``; forked processes find it without a file."""
    module: Any = ModuleType("gpu.broken")
    module.run = body
    monkeypatch.setitem(sys.modules, "gpu.broken", module)


def fail(bench: Bench) -> None:
    bench.note(before=1)
    raise ValueError("no such kernel")


def hang(bench: Bench) -> None:
    bench.note(before=1)
    subprocess.Popen(["sleep", "600"])  # a child process that is left behind
    time.sleep(600)


def die(bench: Bench) -> None:
    bench.note(before=1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("body", "why"), [(fail, "no such kernel"), (hang, "stopped after 2"), (die, "ended with -9")]
)
def test_a_broken_part_is_reported_with_what_it_had_found(
    body: Callable[[Bench], object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(monkeypatch, body)
    limit = 2.0 if body is hang else 60.0
    seen: list[Result] = []
    monkeypatch.setattr(kit, "LOOK", 0.2)
    result = kit.run("broken", True, tmp_path, limit, seen.append)
    assert result.figures == [{"before": 1}]
    assert body is not hang or seen[-1].figures == result.figures  # reported before the part ended
    assert result.error is not None and why in result.error
    good = kit.run("environment", True, tmp_path, 60.0)  # the next part works
    assert good.error is None and good.figures
    write(tmp_path, [result, good], dry=True)
    text = (tmp_path / "report.md").read_text()
    assert why in text and "| torch |" in text


BUSY = "import os\nos.getloadavg = lambda: (1e3, 0, 0)\npytest_plugins = ['shared_fixtures']\n"
TESTS = """import pytest, time
@pytest.mark.timeout(0.001)
def test_marked():
    time.sleep(0.5)
def test_unmarked():
    pass
"""


def test_a_test_of_the_kit_has_the_limit_of_the_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time limits in marks are ignored: the plugin may be missing on the machine with the GPU.

    Under load they are not extended either; an extended one would still be too short here.
    """
    (tmp_path / "conftest.py").write_text(BUSY)
    (tmp_path / "test_marked.py").write_text(TESTS)
    monkeypatch.setattr(cuda_tests, "TESTS", str(tmp_path))
    folders = (cuda_tests.ROOT / name for name in (".", "launch", "tests/helpers"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    bench = Bench(True, tmp_path / "part.json")
    cuda_tests.run(bench)
    assert [row["result"] for row in bench.figures] == ["passed", "passed"]


def test_the_limit_of_a_command_grows_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0, 0))
    assert command("sleep", "0.3", timeout=0.01).returncode == 0
