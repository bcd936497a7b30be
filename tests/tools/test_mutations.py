"""Each mutation of the table applies to the library, in exactly one place."""

import runpy
from pathlib import Path

from commands import python
from patience import patience

ROOT = Path(__file__).resolve().parents[2]


def test_each_mistake_of_the_table_can_be_made():
    """Without this test, only the nightly run would notice a row that matches nothing."""
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
        if "-k" in row.tests:  # part of a name or of a parameter
            names.append(row.tests[row.tests.index("-k") + 1].rpartition("-")[2])
        missing += [(row.name, name) for name in names if name not in text]
    assert len(rows) > 50
    assert not wrong, wrong
    assert not missing, missing


def test_a_mistake_is_noticed_by_a_test_that_fails_and_by_nothing_else(tmp_path):
    """Time limits and dead processes do not count: both can happen without a mutation."""
    (tmp_path / "shardcast").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "shardcast" / "a.py").write_text("MISTAKE = 0")
    (tmp_path / "tests" / "test_a.py").write_text(
        "import os, time\nexec(open('shardcast/a.py').read())\ndef test_a():\n"
        "    assert MISTAKE != 1\n    MISTAKE != 2 or time.sleep(60)\n"
        "    MISTAKE != 3 or os._exit(9)\n"
    )
    code = (
        "import pathlib, runpy, sys, pytest\ntool = runpy.run_path('tools/mutations.py')\n"
        "for n in range(4):\n"
        "    row = tool['Mutation']('a', 'a.py', '0', str(n), ('test_a.py',))\n"
        f"    print(tool['tried'](row, pathlib.Path({str(tmp_path)!r}), {patience(4.0)}))"
    )
    noticed = python("-c", code)
    assert noticed.stdout.splitlines() == [
        "SURVIVED",
        "tests/test_a.py::test_a",
        "UNDECIDED: time limit",
        "UNDECIDED: status 9",
    ], noticed.stderr
