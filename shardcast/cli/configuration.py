"""``shardcast config``: a configuration file with every option."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import yaml

from shardcast.cli.commands import parser_of
from shardcast.config import ShardcastConfig
from shardcast.option_files import PRESETS, preset


def config(arguments: list[str]) -> int:
    """Write an annotated configuration file with every option and its default, or a preset."""
    parser = parser_of("config")
    parser.add_argument(
        "--preset", choices=PRESETS, help=("start from this preset instead of the defaults")
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: print)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parsed = parser.parse_args(arguments)
    text = preset(parsed.preset).read_text() if parsed.preset else annotated_config()
    if parsed.output is None:
        print(text, end="")
    elif parsed.output.exists() and not parsed.overwrite:
        raise FileExistsError(f"output: {parsed.output} exists; pass --overwrite to replace it")
    else:
        parsed.output.write_text(text)
    return 0


def annotated_config() -> str:
    """Return YAML with the help of every field; options are commented out, with defaults."""
    lines = [
        "# shardcast configuration. Name it in SHARDCAST_CONFIG, or pass it to shardcast.shard().",
        "# Remove the '# ' before an option to change it; every value shown is the default.",
        "# Keywords in code and variables SHARDCAST_<OPTION> take precedence over this file.",
    ]
    defaults = ShardcastConfig().to_dict()
    for option in dataclasses.fields(ShardcastConfig):
        lines += ["", *(f"## {line}" for line in textwrap.wrap(option.metadata["help"], 90))]
        expected, _ = option.metadata["range"]
        if expected:
            lines.append(f"## {expected}")
        if option.name in ("group_fn", "cost_fn"):
            lines.append("## (a function: in code only)")
            continue
        value = yaml.safe_dump({option.name: defaults[option.name]}, default_flow_style=True)
        lines.append(f"# {value.strip().strip('{}')}")
    return "\n".join(lines) + "\n"
