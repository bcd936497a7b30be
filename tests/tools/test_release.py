"""Distributions: complete files, links that work, versions that are tested."""

from __future__ import annotations

import configparser
import email.message
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from shardcast.messages import page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_source_distribution_has_what_its_commands_need() -> None:
    """Each tracked file is in the package or in MANIFEST.in, or its name begins with a dot."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    words = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    included = {name for line in words if line[:1] == ["include"] for name in line[1:]}
    grafted = {line[1] for line in words if line[:1] == ["graft"]}
    always = {"README.md", "LICENSE", "setup.cfg", "setup.py", "MANIFEST.in"}  # by default
    for name in listed.stdout.splitlines():
        folder = name.split("/")[0]
        kept = name in included | always or folder in grafted | {"shardcast"}
        assert kept or name.startswith("."), name


def test_errors_name_pages_that_exist_at_the_address_that_the_distribution_names() -> None:
    sources = (path.read_text() for path in (ROOT / "shardcast").rglob("*.py"))
    named = {name for text in sources for name in re.findall(r"page\([\"'](.+?)[\"']\)", text)}
    assert {"optimizers", "troubleshooting"} <= named
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
    """The oldest tested version is the oldest allowed one; the newest is the pinned one."""
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


@pytest.mark.parametrize("url", ["", "https://example.org/project"])
def test_the_long_description_installs_by_name_and_has_no_relative_links(
    url: str, tmp_path: Path
) -> None:
    for name in ("README.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path / name)
    tool = ROOT / "tools" / "long_description.py"
    subprocess.run([sys.executable, str(tool), str(tmp_path), url], check=True)
    text = (tmp_path / "LONG_DESCRIPTION.md").read_text()
    assert "pip install shardcast-optim\n" in text
    assert "pip install 'shardcast-optim[accelerate]' " in text
    assert " also 'shardcast-optim[transformers]' and 'shardcast-optim[lightning]'\n" in text
    assert not re.search(r"pip install \.|'\.\[", text)
    links = re.findall(r"\]\((?!https?://(?!example)|#)([^)]+)\)", text)
    assert bool(links) == bool(url) and all(link.startswith(url) for link in links)
    assert "long_description = file: LONG_DESCRIPTION.md" in (tmp_path / "setup.cfg").read_text()


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def build(kind: str, tree: Path, output: Path) -> Path:
    """Build with pip's backend, in this environment."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(output)!r}))"
    command = [sys.executable, "-c", code]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return output / built.stdout.splitlines()[-1]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_wheel_and_sdist_have_the_package_and_run_in_an_environment_of_their_own(tmp_path: Path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tree, output, unpacked = (tmp_path / name for name in ("tree", "output", "unpacked"))
    output.mkdir()
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    sdist, wheel = build("sdist", tree, output), build("wheel", tree, output)
    assert contents(wheel) == {name for name in tracked() if name.startswith("shardcast/")}
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (again,) = unpacked.iterdir()
    of_sdist = build("wheel", again, again)
    assert of_sdist.name == wheel.name and contents(of_sdist) == contents(wheel)

    venv.create(tmp_path / "empty")
    python = tmp_path / "empty/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    # If PYTHONPATH names the checkout, pip treats its egg-info as an installed package.
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, *install], cwd=tmp_path, env=elsewhere, check=True)
    # A .pth file makes this environment's torch importable, but not the checkout.
    (place,) = (tmp_path / "empty/lib").glob("python*/site-packages")
    (place / "torch.pth").write_text(sysconfig.get_path("purelib"))
    printed = subprocess.check_output(
        [str(tmp_path / "empty/bin/shardcast"), "env"], cwd=tmp_path, env={}, text=True
    )
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    version = config["metadata"]["version"]
    assert re.search(rf"^ *shardcast +{re.escape(version)}\b", printed, re.MULTILINE), printed
    found = "import shardcast; print(shardcast.__file__)"
    where = subprocess.check_output([python, "-c", found], cwd=tmp_path, env={}, text=True)
    assert where.startswith(str(place))
