"""Options in files and in environment variables: YAML, whose errors are named.

By file, line and column, or by the variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardcast.option_values import GONE, ValidatedOptions, nearest, read_option, unknown

ENV_PREFIX = "SHARDCAST_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
PRESETS = ("lean",)  # by name in place of a file


def preset(name: str) -> Path:
    """The file of a preset."""
    return Path(__file__).parent / "presets" / f"{name}.yaml"


def read_config(kind: type[ValidatedOptions], name: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a ``kind`` in a file, or in the preset of that ``name``; they are checked.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: as of :func:`check_file`.
    """
    path = preset(str(name)) if str(name) in PRESETS else Path(name)
    if not path.exists():
        origin = f"given in code or by {CONFIG_VARIABLE}"
        raise FileNotFoundError(
            f"config: no file {str(name)!r} ({origin}) in {os.getcwd()!r}, and none of "
            f"the presets: {', '.join(PRESETS)}"
        )
    values = read_yaml(path)
    check_file(kind, values, path)
    return values


def check_file(
    kind: type[ValidatedOptions], values: Mapping[str, Any], file: Path, section: str = ""
) -> None:
    """Raise for a key of YAML that is no option of ``kind``, and for a value that it cannot have.

    The error says file, line and column.

    Args:
        values: of the options, at the top of the file or in its ``section``.

    Raises:
        TypeError, ValueError: see above.
    """
    declared = {each.name: each for each in fields(kind)}
    for key, value in values.items():
        try:
            if key not in declared:
                raise ValueError(unknown(key, [*declared]))
            read_option(declared[key], value)
        except (TypeError, ValueError) as error:
            line = _line_of([section, key] if section else [key], file)
            raise type(error)(f"{file}{line}: {error}") from None


def _line_of(path: Sequence[str], file: Path) -> str:
    """The line and column of a key in YAML, below those before it in ``path``."""
    import yaml

    node, mark = yaml.compose(file.read_text(), yaml.SafeLoader), None
    for key in path:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if name.value == str(key):
                node, mark = value, name.start_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML that stands in ``where``; ValueError if it is none."""
    import yaml  # not needed to import shardcast

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{where}: expected YAML, got {text[:80]!r}; {at}{problem}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, empty if nothing is there; ValueError for anything else."""
    content = parse_yaml(path.read_text(), str(path)) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of options, got {type(content).__name__}")
    return content


def read_environment(kind: type[ValidatedOptions], variables: Mapping[str, str]) -> dict[str, Any]:
    """The options of a ``kind`` in ``SHARDCAST_<FIELD>`` variables, each YAML; they are checked.

    Raises:
        ValueError: a variable of no option, naming the nearest one, or something that is not YAML.
        TypeError, ValueError: a value that the option cannot have.
    """
    declared = {ENV_PREFIX + each.name.upper(): each for each in fields(kind)}
    values: dict[str, Any] = {}
    for variable, text in variables.items():
        if variable not in declared:
            gone = GONE.get(variable.removeprefix(ENV_PREFIX).lower())
            end = nearest(variable, [*declared]) if gone is None else f"; {gone}"
            raise ValueError(f"environment: unknown variable {variable}{end}")
        # As YAML a pattern that begins with * would be an alias.
        value = text if text.startswith("*") else parse_yaml(text, variable)
        try:
            values[declared[variable].name] = read_option(declared[variable], value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{variable}: {error}") from None
    return values
