"""Fail the build if a public name, or one that a page uses in full, is missing from the API pages.

mkdocstrings shows the names in a module's ``__all__``, with their public members, if these have
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
# No names of the API: a module that is run, a text, a file of a checkpoint.
COMMANDS = {"shardcast.run", "shardcast.__version__", "shardcast.json"}


def public(package: griffe.Object) -> list[str]:
    """Every option of ``shard()`` and every method and property of what it returns."""
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
    """Every method and property of the optimizer that an extension provides."""
    return list(ast.literal_eval(str(package["option_values.CALLS"].value)))


def on_post_build(config: MkDocsConfig) -> None:
    shown = {*config.plugins["mkdocstrings"].handlers.inventory, *COMMANDS}
    # A function has the name of its module: the page asks for it by its whole path.
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
