"""Other libraries' test suites: their sources, how they run, and the page of results.

They are not part of this repository. They run as installed, or from a folder of sources whose
files must equal those of the commit that is named here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

OUTCOMES = ("passed", "refused", "not applicable")


@dataclass(frozen=True, eq=False)
class Suite:
    name: str
    claim: str
    source: str
    """Repository, or package on PyPI."""
    path: str
    license: str
    cases: int
    """The number of cases; a run of fewer is not evidence."""
    commit: str = ""
    """Commit of the repository; a package has a version instead."""
    blob: str = ""
    """``git hash-object`` of the file."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Replacements in the file's text, such as imports and devices."""

    @property
    def revision(self) -> str:
        return f"commit {self.commit[:12]}" if self.commit else version(self.source)

    def text(self, sources: Path | None) -> str:
        """Return the file as it is run; skip the test if it does not exist."""
        path = (sources or Path("sources")) / self.source.rpartition("/")[2] / self.path
        if not path.is_file():
            pytest.skip(f"{path} is not there; see the head of launch/test.sh")
        data = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if found != self.blob:
            pytest.fail(f"{path}: expected the file of {self.commit} ({self.blob}), got {found}")
        text = data.decode()
        for old, new in self.replaced.items():
            if old not in text:
                pytest.fail(f"{path} has no {old!r}")
            text = text.replace(old, new)
        return text


class Verdict(NamedTuple):
    suite: Suite
    case: str
    outcome: str
    """One of :data:`OUTCOMES`."""
    reason: str = ""


class Ran(NamedTuple):
    """A test of a foreign file, as pytest reported it."""

    name: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    message: str


def run_pytest(file: Path, *arguments: str, path: Sequence[Path] = (), timeout: int) -> list[Ran]:
    """Run a foreign file with pytest in a new process, without this project's settings."""
    report = file.with_suffix(".xml")
    settings = file.parent / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    folders = [Path.cwd(), Path(__file__).parent, *path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    words = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*words, f"--timeout={timeout}", f"--junitxml={report}", str(file), *arguments],
        env=environment,
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode not in (0, 1):
        pytest.fail(f"{file.name} did not run:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")
    return list(_cases_of(report))


def _cases_of(report: Path) -> Iterable[Ran]:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        worst = "passed"
        message = ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                worst = "skipped" if part.tag == "skipped" else "failed"
                message = f"{part.get('message', '')}\n{part.text or ''}"
        yield Ran(name, worst, message)


def judge(
    suite: Suite,
    ran: Sequence[Ran],
    refused: Mapping[str, tuple[str, str]],
    not_applicable: Mapping[str, str],
    vacuous: Mapping[str, str],
) -> list[Verdict]:
    """Compare the outcome of each test with the expected one.

    Args:
        refused: parts of names, the required words of the error, and the reason.
        not_applicable: parts of names and the reason. Tests that pass must not be in these two.
        vacuous: parts of names of tests that pass without checking anything, and the reason.
    """
    verdicts, wrong = [], []
    used: set[str] = set()
    listed = {**refused, **not_applicable, **vacuous}
    for test in ran:
        key = next((key for key in listed if key in test.name), None)
        if key is not None:
            used.add(key)
        if test.outcome == "passed" and key is None:
            verdicts.append(Verdict(suite, test.name, "passed"))
        elif test.outcome == "skipped" and key is None:
            reason = test.message.strip().splitlines()[0]
            verdicts.append(Verdict(suite, test.name, "not applicable", f"skips itself: {reason}"))
        elif key in refused and test.outcome == "failed" and refused[key][0] in test.message:
            verdicts.append(Verdict(suite, test.name, "refused", refused[key][1]))
        elif key in not_applicable and test.outcome != "passed":
            verdicts.append(Verdict(suite, test.name, "not applicable", not_applicable[key]))
        elif key in vacuous and test.outcome == "passed":
            verdicts.append(Verdict(suite, test.name, "not applicable", vacuous[key]))
        else:
            wrong.append(f"{test.name} {test.outcome}, listed as {key}\n{test.message[-3000:]}")
    wrong += [f"no test is named {key}" for key in listed.keys() - used]
    assert not wrong, "\n\n".join(wrong)
    return verdicts


PREAMBLE = """# Evidence

Tests and scripts of other libraries run on shardcast. Of {cases:,} cases, {passed} pass and
{refused} are refused: an error names cause and remedy, and the run checks its words. The other
{rest} are not applicable, usually because they need something that shardcast does not offer. Every
test of a file is counted.

"""
HOW = """\
`bash launch/test.sh --foreign` runs them. The originals are not part of this repository. Each
section below names a file and its version, and lists what is replaced before a run, such as imports
and devices; no assertion is replaced. The tests of DCP and FSDP2 are rewritten, with the original
models and tolerances. *Left out* lists parts of the original that the rewritten test does not have.
"""
NOT_YET = """## Not run

DeepSpeed's `test_zero2_gradient_safety.py` calls private methods of its optimizer, and the
`*_cpu.py` of Emerging-Optimizers call its functions over tensor-parallel ranks. No sharded
optimizer can replace these. Suites in `tools/conformance/foreign` without a row above have never
been run completely by one command.
"""
HEAD = ("suite", "from", "cases", *OUTCOMES)


def page_of(verdicts: Sequence[Verdict], page: str, failed: Collection[str]) -> str:
    """Return ``page`` with new rows for the suites that ran completely; others keep their rows.

    Args:
        failed: names of suites with a failed test; they lose their rows.
    """
    rows = {_name(line): line for line in page.splitlines() if line.startswith("| [")}
    parts = {part.partition("\n")[0]: part.strip() for part in page.split("\n## ")[1:]}
    parts.pop("Not run", None)
    suites = dict.fromkeys(verdict.suite.name for verdict in verdicts)
    for name in {*suites, *failed}:
        mine = [verdict for verdict in verdicts if verdict.suite.name == name]
        if name in failed:
            rows.pop(name, None)
            parts.pop(name, None)
        elif len(mine) == mine[0].suite.cases:
            rows[name], parts[name] = _row(mine), _part(mine)
    table = [f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    table += [rows[name] for name in sorted(rows)]
    counts = [map(int, row.strip("| ").split(" | ")[2:]) for row in rows.values()]
    cases, passed, refused, rest = map(sum, zip(*counts, strict=True)) if rows else (0,) * 4
    lead = PREAMBLE.format(cases=cases, passed=passed, refused=refused, rest=rest)
    sections = [f"## {parts[name]}" for name in sorted(parts)]
    return lead + "\n\n".join(["\n".join(table), HOW.rstrip(), *sections, NOT_YET])


def _name(line: str) -> str:
    return line.partition("[")[2].partition("]")[0]


def _row(verdicts: Sequence[Verdict]) -> str:
    suite = verdicts[0].suite
    counts = Counter(verdict.outcome for verdict in verdicts)
    anchor = suite.name.lower().replace(" ", "-").replace(".", "").replace(",", "")
    cells = [f"[{suite.name}](#{anchor})", suite.source, str(suite.cases)]
    return f"| {' | '.join([*cells, *(str(counts[it]) for it in OUTCOMES)])} |"


def _part(verdicts: Sequence[Verdict]) -> str:
    suite = verdicts[0].suite
    where = f"`{suite.path}` of {suite.source}, {suite.revision}, {suite.license}"
    lines = [suite.name, "", f"{where}: {suite.claim}.", ""]
    if suite.replaced:
        lines += ["| in the file | is run as |", "|---|---|"]
        lines += [f"| {_code(old)} | {_code(new)} |" for old, new in suite.replaced.items()]
        lines += [""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.reason:
            reasons.setdefault((verdict.outcome, verdict.reason), []).append(verdict.case)
    if reasons:
        lines += ["| cases | outcome | reason | which |", "|---:|---|---|---|"]
    for (outcome, reason), cases in sorted(reasons.items()):
        few = ", ".join(f"`{case}`" for case in cases[:3]) + (" …" if len(cases) > 3 else "")
        lines.append(f"| {len(cases)} | {outcome} | {_cell(reason)} | {_cell(few)} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    return "<br>".join(f"`{_cell(line)}`" for line in lines if line) or "nothing"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
