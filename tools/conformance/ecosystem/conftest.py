"""Write the results of all recipes into the tables of ``docs/tested-scripts.md``."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from recipes import ENTRIES, Row, missing, table_of

os.environ["HF_HUB_OFFLINE"] = "1"  # models and tokenizers are created locally
# The forkserver of Python 3.11 imports preloaded modules before it copies sys.path.
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), str(HERE.parents[2] / "tests/helpers"), os.environ.get("PYTHONPATH", "")]
)
ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recipes", metavar="FILE", help="write the results into the tables of FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.hookimpl(trylast=True)  # after the parent folder's hook, which preloads other modules
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shipped = {"shipped" in item.nodeid for item in items}
    warm = ["warm"] * (False in shipped) + ["warm_shipped"] * (True in shipped)
    multiprocessing.set_forkserver_preload(["harness", *warm])


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash[ROWS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    path, rows = config.getoption("--recipes"), config.stash[ROWS]
    if path is None:
        terminalreporter.write_line(table_of(rows))
        return
    names = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    failed = [entry for entry in ENTRIES if any(name.endswith(f"[{entry.id}]") for name in names)]
    page = table_of(rows, Path(path).read_text(encoding="utf-8"), failed)
    Path(path).write_text(page, encoding="utf-8")
    if left := missing(page):
        terminalreporter.write_line(f"{path} has no row of: {'; '.join(left)}")
