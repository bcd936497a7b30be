"""The API reference lists all options and methods, and docstrings say which ranks must call."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import options  # tools/options.py
import pytest

import shardcast
from shardcast.option_values import CALLS

DOCS = Path(__file__).parents[2] / "docs"
WHO = re.compile(r"Collective|Local|[Ee]very rank|all ranks must|Any process")


def methods() -> dict[str, Any]:
    """Return the public members that shardcast adds to an optimizer, by name."""
    found = {}
    for name in dir(shardcast.ShardedOptimizer):
        member = inspect.getattr_static(shardcast.ShardedOptimizer, name)
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and str(getattr(function, "__module__", "")).startswith(
            "shard"
        ):
            found[name] = function
    return found


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by full name."""
    found = {}
    for module in ("", ".checkpoint", ".estimate", ".metrics"):
        package = importlib.import_module(f"shardcast{module}")
        for name in package.__all__:
            if inspect.isfunction(getattr(package, name)):
                found[f"shardcast{module}.{name}"] = getattr(package, name)
    return found


def test_the_page_has_every_public_method_and_call() -> None:
    page = (DOCS / "api" / "shardcast.md").read_text()
    listed = set(re.findall(r"^ +- (\w+)$", page, re.MULTILINE))
    listed |= {n for line in re.findall(r"members: \[(.*?)\]", page) for n in line.split(", ")}
    assert {*methods(), *CALLS, *shardcast.__all__} - listed <= {"ShardedOptimizer"}
    assert page.index("shard,") < page.index("ShardcastConfig"), "shard() is first"


def test_the_page_of_options_is_up_to_date_with_every_option_once_and_shows_stars() -> None:
    """Outside code, Markdown reads two unescaped stars in a row as emphasis and drops them."""
    assert options.main(["--check"]) == 0, "run python tools/options.py"
    page = (DOCS / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(option.name for option in fields(shardcast.ShardcastConfig))
    prose = re.sub(r"`[^`]*`", "", re.sub(r"\A.*?^\|", "|", page, flags=re.DOTALL | re.MULTILINE))
    assert r"\*.mlp" in prose
    assert not re.search(r"(?<!\\)\*", prose)


@pytest.mark.parametrize("name", [*methods()])
def test_a_methods_docstring_says_who_must_call(name: str) -> None:
    member = inspect.getattr_static(shardcast.ShardedOptimizer, name)
    text = inspect.getdoc(member) or ""
    assert text
    assert isinstance(member, property) or WHO.search(text), "Collective: every rank, or Local"


@pytest.mark.parametrize("name", [*functions()])
def test_a_functions_docstring_says_who_must_call_and_explains_its_arguments(name: str) -> None:
    function = functions()[name]
    text = inspect.getdoc(function) or ""
    assert WHO.search(text)
    if "Args:" in text:
        section = text.split("Args:")[1].split("\n\n")[0]
        rows = re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE)
        named = {argument for row in rows for argument in row.split(", ")}
        expected = {*inspect.signature(function).parameters} - {"config"}
        assert expected <= named | {"config"}
