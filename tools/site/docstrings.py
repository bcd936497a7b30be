"""Convert RST roles, literal blocks and tables of docstrings to Markdown, for Griffe."""

import itertools
import re
import textwrap
from pathlib import Path

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([^`]+)`")
LITERAL = re.compile(r"(?<!`)``([^`]+)``(?!`)")
OPTIONS = {
    cells[1]: cells[2:5]
    for line in (Path(__file__).parents[2] / "docs" / "options.md").read_text().splitlines()
    if line.startswith("| `") and (cells := [c.strip(" `") for c in re.split(r"(?<!\\)\|", line)])
}
RULE = re.compile(r"^\s*=+(\s+=+)+\s*$")


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        self.visit(pkg)

    def visit(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            thing.docstring.value = markdown(thing.docstring.value, thing)
        for member in thing.members.values():
            if isinstance(member, griffe.Alias):
                continue
            if thing.path == "shardcast.config.ShardcastConfig" and member.is_attribute:
                as_option(member)
            elif "instance-attribute" in member.labels and member.value is not None:
                member.value = None  # an expression of __init__
            self.visit(member)


def as_option(field: griffe.Attribute) -> None:
    """Give a field of the configuration its default, and its values and help as a docstring.

    They are read from docs/options.md, since most options have their help in another module. A
    test compares that page with the configuration.
    """
    if field.name not in OPTIONS:
        return
    values, default, text = OPTIONS[field.name]
    field.value = default.strip("`")
    text = f"{text[0].upper()}{text[1:]}. Values: {values}."
    field.docstring = griffe.Docstring(text, parent=field)


def markdown(text: str, thing: griffe.Object) -> str:
    text = ROLE.sub(lambda match: reference(match[1], thing), text)
    text = LITERAL.sub(r"`\1`", text)
    return "\n".join(tables(blocks(text.splitlines())))


def reference(name: str, thing: griffe.Object) -> str:
    """Return a link to the description of a name used by ``thing``, if the site has one."""
    first, _, rest = name.partition(".")
    try:
        target = ".".join(filter(None, [thing.resolve(first), rest]))
    except griffe.NameResolutionError:
        target = name
    return f'<autoref optional identifier="{target}"><code>{name}</code></autoref>'


def blocks(lines: list[str]) -> list[str]:
    """Convert ``::`` and the indented lines below it to a fenced block."""
    result: list[str] = []
    while lines:
        line, *lines = lines
        text = line.rstrip()
        if not text.endswith("::"):
            result.append(line)
            continue
        pad = line[: indent(line)]
        count = next((i for i, below in enumerate(lines) if not deeper(below, line)), len(lines))
        body = textwrap.dedent("\n".join(lines[:count])).strip("\n").splitlines()
        lines = lines[count:]
        result += ["" if text.strip() == "::" else text[:-1], ""]
        result += [f"{pad}```python", *(pad + code for code in body), f"{pad}```", ""]
    return result


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def deeper(below: str, line: str) -> bool:
    return not below.strip() or indent(below) > indent(line)


def tables(lines: list[str]) -> list[str]:
    """Convert simple RST tables to Markdown."""
    result: list[str] = []
    edges: list[int] = []
    rules = 0
    for line in lines:
        if RULE.match(line):
            rules = rules % 3 + 1
            if rules == 1:
                edges = [match.start() for match in re.finditer(r"=+", line)] + [10**6]
            elif rules == 2:
                result.append("|" + "---|" * (len(edges) - 1))
            continue
        if rules in (1, 2) and line.strip():
            cells = [line[a:b].strip() for a, b in itertools.pairwise(edges)]
            line = "| " + " | ".join(cells) + " |"
        result.append(line)
    return result
