"""Fails the build of the site where a public name has no docstring, or is on no page of the API.

Public is what ``__all__`` of a module on the page "API" has, with the public members of its
classes; what a page calls by its full name, such as ``shardcast.checkpoint.save``, must be that.
"""

import re
import sys
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).parent))
from pages import API, CODE, ROOT, public_names

NAME = re.compile(r"\bshardcast(?:\.[A-Za-z_]\w*)+")
# No names of the API: a module that is run, a text, a file of a checkpoint.
COMMANDS = {"shardcast.run", "shardcast.__version__", "shardcast.json"}
# Members that others name.
METHODS_OF_TORCH = "shardcast.testing.group."
ATTRIBUTES_OF_FRAMEWORKS = ("shardcast.lightning.", "shardcast.transformers.")


def on_post_build(config: MkDocsConfig) -> None:
    package = griffe.load("shardcast", search_paths=[ROOT])
    public = {f"{m}.{name}": package[f"{m}.{name}"[10:]] for m in API for name in public_names(m)}
    problems = [f"{path}: no docstring" for path in undocumented(public)]
    known = {path for path, _ in members(public)} | set(API) | COMMANDS
    for page in sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"}):
        for code in CODE.findall(page.read_text(encoding="utf-8")):
            for name in NAME.findall(code):
                if name not in known:
                    problems.append(f"{page.relative_to(ROOT)}: {name} is on no page of the API")
    if problems:
        raise PluginError("\n".join(problems))


def members(public: dict[str, griffe.Object | griffe.Alias]):
    """Every public name with its object; of classes their members too, inherited ones with them."""
    for path, thing in public.items():
        yield path, thing
        if thing.is_class:
            for name, member in thing.all_members.items():
                if not name.startswith("_"):
                    yield f"{path}.{name}", member


def undocumented(public: dict[str, griffe.Object | griffe.Alias]):
    for path, thing in members(public):
        target = thing.final_target if thing.is_alias else thing
        if target.path.startswith(METHODS_OF_TORCH):
            continue
        if target.is_attribute and path.startswith(ATTRIBUTES_OF_FRAMEWORKS):
            continue
        if target.docstring is None and not explained(path, target, public):
            yield path


def explained(path: str, thing: griffe.Object, public: dict) -> bool:
    """Whether the docstring of its class names an attribute, or it is an option with its help."""
    owner = thing.parent
    if not thing.is_attribute or owner is None or not owner.is_class:
        return False
    if str(thing.value).startswith("option("):
        return True
    docstrings = [owner.docstring, *(base.docstring for base in owner.mro())]
    text = "\n".join(docstring.value for docstring in docstrings if docstring)
    return re.search(rf"\b{thing.name}\b", text) is not None
