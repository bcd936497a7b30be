"""Options in YAML files and environment variables.

Errors name the file, line and column, or the variable.
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
PRESETS = ("lean",)  # accepted by name instead of a file


def preset(name: str) -> Path:
    """Return the file of a preset."""
    return Path(__file__).parent / "presets" / f"{name}.yaml"


def read_config(kind: type[ValidatedOptions], name: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check options of a ``kind`` from a file, or from the preset of that ``name``.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: as in :func:`check_file`.
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
    kind: type[ValidatedOptions], values: Mapping[str, object], file: Path, section: str = ""
) -> None:
    """Raise for a key in a YAML file that is not an option of ``kind``, or has an invalid value.

    The error names file, line and column.

    Args:
        values: values of the options, at the top level of the file or in its ``section``.

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
    """Return the line and column of a YAML key; ``path`` has the keys above it."""
    import yaml

    node, mark = yaml.compose(file.read_text(), yaml.SafeLoader), None
    for key in path:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if name.value == str(key):
                node, mark = value, name.start_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; raise ValueError, naming ``where``, if it is not YAML."""
    import yaml  # importing shardcast does not need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{where}: expected YAML, got {text[:80]!r}; {at}{problem}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or an empty one; ValueError for anything else."""
    content = parse_yaml(path.read_text(), str(path)) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of options, got {type(content).__name__}")
    return content


def read_environment(kind: type[ValidatedOptions], variables: Mapping[str, str]) -> dict[str, Any]:
    """Read and check options of a ``kind`` from ``SHARDCAST_<OPTION>`` variables, each in YAML.

    Raises:
        ValueError: a variable is not an option (the error names the nearest one), or is not YAML.
        TypeError, ValueError: the option cannot have this value.
    """
    declared = {ENV_PREFIX + each.name.upper(): each for each in fields(kind)}
    values: dict[str, object] = {}
    for variable, text in variables.items():
        if variable not in declared:
            gone = GONE.get(variable.removeprefix(ENV_PREFIX).lower())
            end = nearest(variable, [*declared]) if gone is None else f"; {gone}"
            raise ValueError(f"environment: unknown variable {variable}{end}")
        # YAML would read a pattern that begins with * as an alias.
        value = text if text.startswith("*") else parse_yaml(text, variable)
        try:
            values[declared[variable].name] = read_option(declared[variable], value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{variable}: {error}") from None
    return values
