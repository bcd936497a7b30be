"""Collects the figures of all recipes into the table of ``docs/tested-scripts.md``."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from recipes import ENTRIES, Row, table_of

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: models and tokenizers are made here
# The forkserver of Python 3.11 does not take over sys.path before it imports what is preloaded.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)
ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recipes", metavar="FILE", help="write the table of recipes to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.hookimpl(trylast=True)  # the directory above asks for other modules
def pytest_collection_modifyitems() -> None:
    multiprocessing.set_forkserver_preload(["harness", "warm"])


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash[ROWS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    table = table_of(config.stash[ROWS])
    path = config.getoption("--recipes")
    if path is None:
        terminalreporter.write_line(table)
    elif len(config.stash[ROWS]) == len(ENTRIES) and not terminalreporter.stats.get("failed"):
        Path(path).write_text(table, encoding="utf-8")
    else:
        terminalreporter.write_line(f"{path} stays as it is: not every recipe passed")
