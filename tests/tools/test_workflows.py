"""``.github/workflows``: their scripts exist, and their versions are those of ``setup.cfg``."""

from __future__ import annotations

import configparser
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
if not FOLDER.exists():  # in the source distribution
    pytest.skip("no workflows here", allow_module_level=True)
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))
}


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_is_there_and_is_shell(name: str):
    ran = [step["run"] for step in steps(WORKFLOWS[name]) if "run" in step]
    for text in ran:
        script = re.sub(r"\$\{\{.*?\}\}", "value", text)
        checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
        assert not checked.returncode, checked.stderr
        for path in re.findall(r"bash ([\w./-]+)", script):
            assert (ROOT / path).is_file(), path


def test_the_tests_run_on_each_python_and_on_the_oldest_the_pinned_and_the_newest_torch():
    matrix = WORKFLOWS["tests"]["jobs"]["versions"]["strategy"]["matrix"]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    classifiers = config["metadata"]["classifiers"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    script, pinned = ((ROOT / name).read_text() for name in ("launch/test.sh", "constraints.txt"))
    oldest, newest = re.findall(r"^    run_with \.venv-torch-([\d.]+) ", script, re.MULTILINE)
    (torch,) = re.findall(r"^torch==([\d.]+)", pinned, re.MULTILINE)
    assert matrix["torch"] == [oldest, torch, newest]
    assert config["options"]["install_requires"].split()[0] == f"torch>={oldest.rstrip('.0')}"


def test_the_parts_of_a_night_are_those_that_the_script_has():
    parts = WORKFLOWS["nightly"]["jobs"]["part"]["strategy"]["matrix"]["part"]
    script = (ROOT / "launch/test.sh").read_text()
    assert re.findall(r"set -- (.*)", script) == [" ".join(parts)]


def test_pre_commit_runs_the_linters_of_ci():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repo["hooks"]
    assert repo["repo"] == "local" and hook["language"] == "system"
    assert {"run": hook["entry"]} in WORKFLOWS["tests"]["jobs"]["lint"]["steps"]


def test_sources_are_fetched_at_the_commits_that_the_suites_name():
    conformance = ROOT / "tools/conformance"
    suites = [*conformance.glob("foreign/test_*.py"), ROOT / "tools/speedrun.py"]
    text = "".join(path.read_text() for path in suites)
    named = {*re.findall(r'(?:commit=|COMMIT = )"([0-9a-f]{40})"', text)}
    listed = (conformance / "sources.txt").read_text()
    assert {*re.findall(r"^[^#].* ([0-9a-f]{40})$", listed, re.MULTILINE)} == named
