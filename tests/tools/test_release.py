"""What is distributed: enough to run the tests, links that lead somewhere, the versions tested."""

from __future__ import annotations

import configparser
import email.message
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from long_description import RELATIVE, prepare, without_relative_links
from packaging.requirements import Requirement

from shardcast.messages import page

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_source_distribution_has_what_its_commands_need() -> None:
    """Every tracked file is the package's, or is taken along, or is of no use outside of git."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    words = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    included = {name for line in words if line[:1] == ["include"] for name in line[1:]}
    grafted = {line[1] for line in words if line[:1] == ["graft"]}
    always = {"README.md", "LICENSE", "setup.cfg", "setup.py", "MANIFEST.in"}  # by setuptools
    for name in listed.stdout.splitlines():
        folder = name.split("/")[0]
        kept = name in included | always or folder in grafted | {"shardcast"}
        assert kept or name.startswith("."), name


def test_relative_links_lead_to_files_and_not_out_of_the_long_description() -> None:
    targets = [target.split("#")[0] for _, target in RELATIVE.findall(README)]
    assert targets and all((ROOT / target).exists() for target in targets)
    assert not RELATIVE.search(without_relative_links(README, ""))
    linked = without_relative_links(README, "https://example.org/project")
    assert not RELATIVE.search(linked)
    picture, page = targets[:2]
    assert f"](https://example.org/project/raw/main/{picture})" in linked
    assert f"](https://example.org/project/blob/main/{page})" in linked


def test_the_tree_that_is_built_names_its_long_description(tmp_path: Path) -> None:
    for name in ("README.md", "setup.cfg"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    prepare(tmp_path, "https://example.org/project")
    config = configparser.ConfigParser()
    config.read(tmp_path / "setup.cfg")
    assert config["metadata"]["long_description"] == "file: LONG_DESCRIPTION.md"
    assert config["metadata"]["url"] == "https://example.org/project"
    with pytest.raises(SystemExit, match=r"does not name README\.md"):
        prepare(tmp_path, "")


def test_errors_name_pages_that_exist_at_the_address_that_the_distribution_names() -> None:
    sources = (path.read_text() for path in (ROOT / "shardcast").rglob("*.py"))
    named = {name for text in sources for name in re.findall(r"page\([\"'](.+?)[\"']\)", text)}
    assert {"averages", "troubleshooting"} <= named
    assert all((ROOT / "docs" / f"{name}.md").exists() for name in named)
    built = email.message.Message()
    built["Project-URL"] = "Documentation, https://example.org/project/blob/main/docs"
    for metadata, where in (
        (built, built["Project-URL"].split()[1]),
        (email.message.Message(), "docs"),
    ):
        with mock.patch("importlib.metadata.metadata", return_value=metadata):
            assert page("gradients") == f"{where}/gradients.md"


@pytest.mark.parametrize("package", ["Accelerate", "transformers", "Lightning"])
def test_what_may_be_installed_is_what_is_said_to_be_tested(package: str) -> None:
    """The oldest version that is tested is the oldest allowed; the newest is the pinned one."""
    names, versions = re.findall(r"^\| (torch \|.*|\d\.\d+, .*) \|$", README, re.MULTILINE)
    columns = dict(zip(names.split(" | "), versions.split(" | "), strict=True))
    oldest_tested, *_, newest_tested = columns[package].split(", ")
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    lines = config["options"]["install_requires"] + extras["transformers"] + extras["lightning"]
    allowed = {r.name: r for r in map(Requirement, lines.split())}
    pinned = dict(
        line.split(" ;")[0].split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    name = package.lower()
    oldest = str(allowed[name].specifier).removeprefix(">=")
    assert oldest_tested.startswith(oldest), f"setup.cfg allows {name}{allowed[name].specifier}"
    assert pinned[name] == newest_tested
