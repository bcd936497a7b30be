"""``shardcast inspect`` and ``shardcast export``: checkpoints from the command line."""

from __future__ import annotations

import math
import re
from pathlib import Path

from shardcast import checkpoint
from shardcast.checkpoint.dcp import Reader
from shardcast.checkpoint.directory import is_checkpoint, steps
from shardcast.cli.commands import parser_of

CHECKPOINT_HELP = (
    "a checkpoint, or a directory of checkpoints (the newest one is used); directories of "
    "Accelerate and Trainer work, too"
)
FOLDER = "shardcast"  # in folders of the adapters
NUMBERED = re.compile(r"(?:state-|checkpoint[-_])(\d+)")  # by Accelerate and Trainer


def inspect(arguments: list[str]) -> int:
    """Show a checkpoint: step, ranks, size, and every tensor."""
    parser = parser_of("inspect")
    parser.add_argument("directory", help=CHECKPOINT_HELP)
    folder = _located(parser.parse_args(arguments).directory)
    print("\n".join(_table(checkpoint.inspect(folder))))
    return 0


def _located(directory: str) -> str:
    """Return the checkpoint in a folder of Accelerate, Trainer or Lightning, or ``directory``.

    It is ``shardcast/`` in the folder, or in the newest of its numbered subfolders.
    """
    path = Path(directory)
    if not path.is_dir() or is_checkpoint(path) or steps(path):
        return directory
    numbered = [(int(m[1]), f) for f in path.iterdir() if (m := NUMBERED.fullmatch(f.name))]
    folders = [path, *(folder for _, folder in sorted(numbered, reverse=True))]
    inside = [folder / FOLDER for folder in folders if steps(folder / FOLDER)]
    return str(inside[0]) if inside else directory


def _table(info: checkpoint.Manifest) -> list[str]:
    """Print each parameter with its optimizer state."""
    of_optimizer, stored_at = info.trained, Reader(info.path).stored  # read from files
    states: dict[str, list[str]] = {}  # names of state tensors, by parameter
    for path in stored_at:
        if path[:2] == ("optimizer", "state") and len(path) == 4:
            states.setdefault(path[2], []).append(path[3])
    rows = [("tensor", "shape", "dtype", "state of the optimizer")]
    trained, others = 0, 0
    for path, stored in stored_at.items():
        if path[0] == "model" and len(path) == 2:
            name = path[1]
            dtype = str(stored.dtype).removeprefix("torch.")
            shape = "x".join(map(str, stored.shape)) or "-"
            rows.append((name, shape, dtype, ", ".join(states.get(name, ()))))
            if name in of_optimizer:
                trained += math.prod(stored.shape)
            else:
                others += math.prod(stored.shape)
    widths = [max(len(row[column]) for row in rows) for column in range(3)] + [0]
    made, nbytes = info.optimizer_steps, info.nbytes
    size = f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"
    return [
        f"checkpoint  {info.path}",
        f"step        {info.step}" + ("" if made is None else f", after {made} optimizer steps"),
        f"saved by    {info.world_size} ranks, partition {info.partition}, {info.optimizer}",
        f"written by  torch {info.torch}, Python {info.python}",
        f"parameters  {trained:,} trained, {others:,} others and buffers",
        f"size        {size} ({nbytes:,} bytes) in {len(info.files)} files, checksums valid",
        "",
        *(
            "  ".join(map(str.ljust, row, widths)).rstrip()  # columns
            for row in rows
        ),
    ]


def export(arguments: list[str]) -> int:
    """Write a checkpoint's model as safetensors and its plain torch optimizer state."""
    parser = parser_of("export")
    parser.add_argument("directory", help=CHECKPOINT_HELP)
    parser.add_argument("out", help="directory to write, new or empty")
    parser.add_argument(
        "--max_shard_mb",
        "--max-shard-mb",
        type=float,
        default=5000.0,
        metavar="MB",
        help="largest size of a weights file in MB (default: 5000)",
    )
    parser.add_argument(
        "--model_only", "--model-only", action="store_true", help="leave the optimizer state out"
    )
    parser.add_argument(
        "--weights",
        metavar="NAME",
        help="what to write instead of the weights: the name of an average, or 'published' for the "
        "codes and scales of published forms",
    )
    parsed = parser.parse_args(arguments)
    written = checkpoint.export(
        _located(parsed.directory),
        parsed.out,
        max_shard_mb=parsed.max_shard_mb,
        optimizer=not parsed.model_only,
        weights=parsed.weights,
    )
    for path in written:
        print(path)
    return 0
