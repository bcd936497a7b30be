"""Write docs/options.md from ShardcastConfig: python tools/options.py [--check]."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from shardcast import ShardcastConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

Give an option as a keyword of `shard()`, as `SHARDCAST_<OPTION>` in the environment, or in a YAML
file. The first of these wins. Pass the file as `shard(model, optimizer, "my.yaml")`, or name it in
`SHARDCAST_CONFIG`. Unknown names are errors.
"""
GROUPS = {
    "Common": (
        "param_dtype",
        "max_grad_norm",
        "autocast",
        "keep_fp32",
        "averages",
        "guard",
        "on_error",
        "metrics",
        "broadcast_buffers",
    ),
    "Memory": ("accumulate", "master", "moments", "offload", "shard_ranks"),
    "Precision": (
        "published",
        "grad_dtype",
        "reduce_dtype",
        "fp32_outputs",
        "cast_forward_inputs",
        "cast_buffers",
        "convert_rest",
        "loss_scale",
        "loss_scale_init",
        "loss_scale_growth_interval",
    ),
}
REST = "Advanced"  # every other option
VALUES = {
    "torch.dtype": "bf16, fp16, fp32",
    "bool": "true, false",
    "int": "a number",
    "float": "a number",
    "tuple[KeepRule, ...]": "a list",
    "tuple[str, ...]": "a list of patterns",
    "bool | tuple[str, ...]": "true, false or a list of patterns",
    "GroupFn": "a function",
    "CostFn": "a function",
}


def values_of(option: dataclasses.Field[Any]) -> str:
    """Return the values of an option: its range if it has one, else those of its type."""
    kind = str(option.type).removesuffix(" | None")
    values = option.metadata["range"][0].removeprefix("one of ") or VALUES[kind]
    return values + (", null" if kind != option.type else "")


def page() -> str:
    """Return the page: one table per group, with other options in the order of the class."""
    options = {option.name: option for option in dataclasses.fields(ShardcastConfig)}
    defaults = ShardcastConfig().to_dict()
    named = {name for names in GROUPS.values() for name in names}
    text = HEAD
    for group, names in {**GROUPS, REST: [name for name in options if name not in named]}.items():
        text += f'\n## {group}\n\n<div class="stacked options" markdown>\n\n'
        text += "| option | values | default | what it does |\n|---|---|---|---|\n"
        for name in names:
            default, option = defaults[name], options[name]
            shown = json.dumps(default) if not isinstance(default, str) else default  # as in YAML
            cells = [f"`{name}`", values_of(option), f"`{shown}`", option.metadata["help"]]
            cells[3] = cells[3].replace("*", "\\*")  # of glob patterns, which Markdown would drop
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        text += "\n</div>\n"
    return text


def main(arguments: list[str]) -> int:
    """Write the page; with ``--check``, only check that it is up to date."""
    if arguments == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
