"""Fail the build if a public name, or a full name in a page, is missing from the API pages.

mkdocstrings shows the names in a module's ``__all__`` and their public members if they have
docstrings.
"""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"\bshardcast(?:\.[A-Za-z_]\w*)+")
# Not part of the API: a module that is run, a string, a file of a checkpoint.
COMMANDS = {"shardcast.run", "shardcast.__version__", "shardcast.json"}


def public(package: griffe.Object) -> list[str]:
    """Return all options of ``shard()``, and all methods and properties of the optimizer."""
    options = package["config.ShardcastConfig"].members
    kind = package["optimizer.sharded.ShardedOptimizer"]
    inherited = {"supports_capture"}
    return [
        *(f"shardcast.ShardcastConfig.{n}" for n, it in options.items() if it.is_attribute),
        *(
            f"shardcast.ShardedOptimizer.{name}"
            for name, member in kind.members.items()
            if not name.startswith("_") and member.is_function | ("property" in member.labels)
            if name not in inherited
        ),
    ]


def calls(package: griffe.Object) -> list[str]:
    """Return the methods and properties of the optimizer that extensions provide."""
    return list(ast.literal_eval(str(package["option_values.CALLS"].value)))


def on_post_build(config: MkDocsConfig) -> None:
    shown = {*config.plugins["mkdocstrings"].handlers.inventory, *COMMANDS}
    # For a function named like its module, the page lists the whole path.
    shown |= {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in shown}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    modules = [f"shardcast.{p.stem}" for p in pages if p.parent.name == "api"]
    package = griffe.load("shardcast", search_paths=[ROOT])
    problems = []
    for module in (package[m[10:]] for m in modules if m != "shardcast.shardcast"):
        names = [f"{module.path}.{name}" for name in module.exports or ()]
        problems += [f"{name}: no docstring" for name in names if name not in shown]
    problems += [f"{name}: not in the API" for name in public(package) if name not in shown]
    provided = {
        n.rpartition(".")[2] for n in shown if re.match(r"shardcast\.(extensions|serving)\.", n)
    }
    problems += [f"optimizer.{n}: not in the API" for n in calls(package) if n not in provided]
    for page in pages:
        for code in CODE.findall(page.read_text(encoding="utf-8")):
            missing = sorted({*NAME.findall(code)} - shown)
            problems += [f"{page.relative_to(ROOT)}: {name} is not in the API" for name in missing]
    if problems:
        raise PluginError("\n".join(problems))
