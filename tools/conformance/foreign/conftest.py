"""Write the results of other libraries' suites into ``docs/evidence.md``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from evidence import Verdict, page_of

VERDICTS = pytest.StashKey[list[Verdict]]()
SUITES = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--evidence", metavar="FILE", help="write complete suites into FILE")
    parser.addoption("--sources", metavar="DIR", help="folder of files that no package has")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[VERDICTS] = []
    config.stash[SUITES] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:  # may include tests of ecosystem/
        if isinstance(item, pytest.Function) and here in item.path.parents:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            # A module with several suites has one test for each.
            suite = parameters.get("suite") or item.module.SUITE
            config.stash[SUITES][item.nodeid] = suite.name


@pytest.fixture
def verdicts(request: pytest.FixtureRequest) -> list[Verdict]:
    return request.config.stash[VERDICTS]


@pytest.fixture(scope="session")
def sources(request: pytest.FixtureRequest) -> Path | None:
    given = request.config.getoption("--sources")
    return None if given is None else Path(given).resolve()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    path = config.getoption("--evidence")
    counts = Counter(verdict.suite for verdict in config.stash[VERDICTS])
    for suite, count in counts.items():
        if count != suite.cases:
            terminalreporter.write_line(f"{suite.name}: {count} of {suite.cases} cases, no row")
    reports = [it for kind in ("failed", "error") for it in terminalreporter.stats.get(kind, [])]
    failed = {config.stash[SUITES].get(report.nodeid, "") for report in reports}
    if path is None:
        terminalreporter.write_line(page_of(config.stash[VERDICTS], "", failed))
        return
    page = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
    Path(path).write_text(page_of(config.stash[VERDICTS], page, failed), encoding="utf-8")
