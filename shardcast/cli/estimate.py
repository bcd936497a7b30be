"""``shardcast estimate``: memory and traffic of an importable model, as a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcast.cli.commands import parser_of
from shardcast.config import ShardcastConfig
from shardcast.estimate import Estimate, peers, state_tensors
from shardcast.estimate import estimate as estimated
from shardcast.messages import page
from shardcast.plan.layout import PackLayout
from shardcast.plan.originals import ELEMENTWISE, OptimizerList

Row = dict[str, Any]  # the figures of one world size


def estimate(arguments: list[str]) -> int:
    """Print what each rank will hold and send, for a model built on the meta device."""
    parsed = _parse(arguments)
    model, originals = _build(parsed.model, parsed.optimizer)
    config = ShardcastConfig.load(parsed.config)
    numel = sum(param.numel() for param in model.parameters())
    title = f"{numel:,} parameters, {originals.name}"
    joined = {
        name: getattr(parsed, name) for name in ("backend", "ranks_per_node", "micro_batches")
    }
    rows = [row_of(model, originals, size, config, joined) for size in parsed.world_size]
    if parsed.json:
        print(json.dumps(rows, indent=2))
        return 0
    print("\n".join(summary(rows, title)))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("estimate")
    parser.epilog = (
        "Example: shardcast estimate my_module:build --config lean --world_size 8 64. "
        f"The figures are explained in {page('memory')}"
    )
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="called without arguments; returns a model, or a model and its optimizers",
    )
    names = sorted(kind.__name__ for kind in ELEMENTWISE)
    parser.add_argument("--optimizer", choices=names, help="class of torch.optim (default: AdamW)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="YAML",
        help="shardcast configuration file, or the preset lean",
    )
    parser.add_argument(
        "--world_size",
        "--world-size",
        type=_positive,
        nargs="+",
        metavar="RANKS",
        default=[1, 2, 4, 8, 16, 64, 256],
        help="numbers of data-parallel ranks, a column for each (default: 1 2 4 8 16 64 256)",
    )
    parser.add_argument(
        "--backend", default="nccl", help="backend of the process group (default: nccl)"
    )
    parser.add_argument(
        "--ranks_per_node",
        "--ranks-per-node",
        type=_positive,
        default=8,
        metavar="RANKS",
        help="data-parallel ranks per node (default: 8)",
    )
    parser.add_argument(
        "--micro_batches",
        "--micro-batches",
        type=_positive,
        default=1,
        metavar="BACKWARDS",
        help="backwards per step (default: 1); from the ninth on, sums are in fp32",
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures in bytes, for scripts"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def function_of(name: str) -> Callable[[], object]:
    """Import the function ``name``, given as ``module:function``."""
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(
            f"model: expected MODULE:FUNCTION, got {name!r}; give both, such as my_module:build"
        )
    sys.path.insert(0, "")  # as python -m does
    try:
        named: Callable[[], object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model: expected MODULE:FUNCTION that can be imported from here, got {name!r} "
            f"({error})"
        ) from error
    return named


def _build(name: str, kind: str | None) -> tuple[nn.Module, OptimizerList]:
    """Call the function ``name``; add an optimizer ``kind`` unless it returns one."""
    build = function_of(name)
    with torch.device("meta"):
        built = build()
    model, *optimizers = built if isinstance(built, tuple) else (built,)
    if len(optimizers) == 1 and isinstance(optimizers[0], (list, tuple)):
        optimizers = list(optimizers[0])
    unknown = [value for value in optimizers if not isinstance(value, torch.optim.Optimizer)]
    if not isinstance(model, nn.Module) or unknown:
        got = ", ".join(type(value).__name__ for value in (model, *optimizers))
        raise ValueError(
            f"model: expected {name} to return a torch.nn.Module, or one and its "
            f"torch.optim.Optimizer or a list of them, got {got}"
        )
    if optimizers and kind is not None:
        raise ValueError(
            f"optimizer: {name} returns one ({type(optimizers[0]).__name__}); leave out "
            f"--optimizer {kind}"
        )
    kind = kind or "AdamW"
    return model, OptimizerList(
        optimizers or [getattr(torch.optim, kind)(model.parameters(), lr=0.1)]
    )


def row_of(
    model: nn.Module,
    originals: OptimizerList,
    size: int,
    config: ShardcastConfig,
    joined: Mapping[str, Any],
) -> Row:
    """Return one world size for JSON: the figures of :class:`.Estimate`, and peers in bytes.

    Args:
        joined: keywords of ``estimate`` for links and micro-batches.
    """
    held = estimated(model, originals, size, config, **joined)
    numel = sum(param.numel() for param in model.parameters())
    figures = {each.name: getattr(held, each.name) for each in fields(held)}
    del figures["layout"]
    return {
        **figures,
        "total": held.total,
        "packs": held.packs,
        "shard_ranks": held.layout.world_size,
        "algorithms": _algorithms(held),
        "others": peers(numel, _moments(originals), size),
        **joined,
    }


def _moments(originals: OptimizerList) -> float:
    """Return the number of state tensors per parameter, averaged over all elements."""
    elements = moments = 0
    for _, owner, group in originals.numbered():
        numel = sum(param.numel() for param in group["params"])
        elements += numel
        moments += numel * state_tensors(owner, group)
    return moments / max(1, elements)


def _algorithms(held: Estimate) -> list[Row]:
    """Return each algorithm with its number of packs, and the reason for the largest pack."""
    ways: dict[tuple[str, str], list[PackLayout]] = {}
    for pack in held.layout.trained if held.world_size > 1 else ():
        ways.setdefault((pack.algorithms.reduce, pack.algorithms.sync), []).append(pack)
    biggest = [(len(packs), max(packs, key=lambda pack: pack.nbytes)) for packs in ways.values()]
    return [{"packs": count, "algorithms": str(pack.algorithms)} for count, pack in biggest]


def summary(rows: Sequence[Row], title: str) -> list[str]:
    """Return a table with a column per world size: memory, traffic, and other systems."""
    columns = [_short(row) for row in rows]
    width = max(9, *(len(cell) + 2 for column in columns for cell in column.values()))
    names = dict.fromkeys(name for column in columns for name in column)
    margin = max(map(len, names))
    return [
        f"{title}; {rows[0]['backend']}, {rows[0]['ranks_per_node']} ranks per node",
        *(
            f"{name:<{margin}}" + "".join(f"{column.get(name, ''):>{width}}" for column in columns)
            for name in names
        ),
        "Without activations. --json prints all figures.",
    ]


def _short(row: Row) -> dict[str, str]:
    """Return the most important figures of one world size, by name."""
    is_shared = row["shard_ranks"] < row["world_size"]
    return {
        "ranks": f"{row['world_size']:,}",
        **({"sharded over": f"{row['shard_ranks']:,}"} if is_shared else {}),
        "GB per rank, shardcast": gigabytes(row["total"]),
        **({"  in fp32, see convert_rest": gigabytes(row["frozen"])} if row["frozen"] else {}),
        **{f"GB per rank, {name}": gigabytes(n) for name, n in row["others"].items()},
        "GB sent per step": gigabytes(row["sent"]),
        "collectives per step": f"{row['collectives']:,}",
    }


def gigabytes(nbytes: float) -> str:
    """Format bytes in GB of 10^9 bytes, with more digits for small numbers."""
    value = nbytes / 1e9
    return f"{value:,.1f}" if value >= 1 else f"{value:.4f}"
