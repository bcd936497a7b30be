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
    missing = []
    for row in rows:
        files = [test.partition("::") for test in row.tests if ".py" in test]
        text = "".join((ROOT / "tests" / file).read_text() for file, *_ in files)
        names = [name.partition("[")[0] for *_, name in files if name]
        if "-k" in row.tests:  # a part of a name, or of what a test is parametrized by
            names.append(row.tests[row.tests.index("-k") + 1].rpartition("-")[2])
        missing += [(row.name, name) for name in names if name not in text]
    assert len(rows) > 50
    assert not wrong, wrong
    assert not missing, missing
