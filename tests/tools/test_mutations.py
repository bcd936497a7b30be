"""The table of mistakes fits the library: each of them can be made, in one place."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_mistake_of_the_table_can_be_made():
    """A row that matches nothing any more tests nothing, and nobody sees it but at night."""
    rows = runpy.run_path(str(ROOT / "tools" / "mutations.py"))["mutations"]()
    wrong = {
        row.name: (ROOT / "shardcast" / row.file).read_text().count(row.old)
        for row in rows
        if (ROOT / "shardcast" / row.file).read_text().count(row.old) != 1
    }
    missing = [
        (row.name, test)
        for row in rows
        for test in row.tests
        if test.endswith(".py") and not (ROOT / "tests" / test).exists()
    ]
    assert len(rows) > 50
    assert not wrong, wrong
    assert not missing, missing
