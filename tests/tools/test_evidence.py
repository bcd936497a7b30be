"""The page of other libraries' tests has no row for a suite with a failed test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOREIGN = Path(__file__).parents[2] / "tools" / "conformance" / "foreign"
OF_ONE = """
from evidence import Suite, Verdict

SUITE = Suite("one", "a claim", "torch", "one.py", "BSD", cases=1)

def test_it(verdicts):
    verdicts.append(Verdict(SUITE, "it", "passed"))
    assert {holds}
"""
OF_SEVERAL = """
import pytest
from evidence import Suite, Verdict

FEW = [Suite(name, "a claim", "torch", name, "BSD", cases=1) for name in ("fails", "holds")]
ERRS = Suite("errs", "a claim", "torch", "errs", "BSD", cases=1)

@pytest.mark.parametrize("suite", FEW)
def test_it(suite, verdicts):
    verdicts.append(Verdict(suite, "it", "passed"))
    assert suite.name == "holds" or {holds}

@pytest.fixture
def ran():
    assert {holds}

@pytest.mark.parametrize("suite", [ERRS])
def test_ran(suite, ran, verdicts):
    verdicts.append(Verdict(suite, "it", "passed"))
"""


@pytest.mark.timeout(60)
def test_a_suite_with_a_test_that_fails_loses_its_row(tmp_path: Path) -> None:
    """Suites are alone in a module, with others, or fail before their tests run.

    A test in another folder has no suite.
    """
    (foreign := tmp_path / "foreign").mkdir()
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n", encoding="utf-8")
    for name in ("conftest.py", "evidence.py"):
        (foreign / name).write_text((FOREIGN / name).read_text(), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    page = tmp_path / "page.md"
    for holds in (True, False):
        for name, code in (("test_one.py", OF_ONE), ("test_several.py", OF_SEVERAL)):
            (foreign / name).write_text(code.replace("{holds}", str(holds)), encoding="utf-8")
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--evidence", str(page)]
        words += ["foreign", "test_other.py"]
        subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, check=False)
        rows = [line for line in page.read_text().splitlines() if line.startswith("| [")]
        found = [row.partition("[")[2].partition("]")[0] for row in rows]
        assert found == (["errs", "fails", "holds", "one"] if holds else ["holds"])
