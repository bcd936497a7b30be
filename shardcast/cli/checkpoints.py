"""``shardcast inspect`` and ``shardcast export``: what a checkpoint holds, and its plain form."""

from __future__ import annotations

import argparse

from shardcast import checkpoint


def inspect(arguments: list[str]) -> int:
    """Show what a checkpoint holds: step, ranks, size, and every tensor."""
    parser = argparse.ArgumentParser(prog="shardcast inspect", allow_abbrev=False)
    parser.add_argument("directory", help="a checkpoint, or the newest one of a directory")
    print("\n".join(table(checkpoint.inspect(parser.parse_args(arguments).directory))))
    return 0


def table(info: checkpoint.Info) -> list[str]:
    """Lines for people; the optimizer's state of a parameter stands beside the parameter."""
    prefix, state = "model.", "optimizer.state."
    rows = [("tensor", "shape", "dtype", "state of the optimizer")]
    kept: dict[str, list[str]] = {}
    for key in info.tensors:
        if key.startswith(state):
            name, _, its = key.removeprefix(state).rpartition(".")
            kept.setdefault(name, []).append(its)
    for key, stored in info.tensors.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            dtype = str(stored.dtype).removeprefix("torch.")
            shape = "x".join(map(str, stored.shape)) or "-"
            rows.append((name, shape, dtype, ", ".join(kept.get(name, ()))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)] + [0]
    lines = [
        f"checkpoint  {info.path}",
        f"step        {info.step}",
        f"saved by    {info.world_size} ranks, partition {info.partition}, {info.optimizer}",
        f"size        {info.nbytes:,} bytes in {len(info.files)} files, checksums right",
        "",
    ]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


def export(arguments: list[str]) -> int:
    """Write a checkpoint's model as safetensors and its plain torch optimizer state."""
    parser = argparse.ArgumentParser(prog="shardcast export", allow_abbrev=False)
    parser.add_argument("directory", help="a checkpoint, or the newest one of a directory")
    parser.add_argument("out", help="a new or an empty directory")
    parser.add_argument("--max_shard_mb", type=float, default=5000.0, help="cut the model at this")
    parser.add_argument("--model_only", action="store_true", help="leave the optimizer state out")
    parsed = parser.parse_args(arguments)
    for path in checkpoint.export(
        parsed.directory,
        parsed.out,
        max_shard_mb=parsed.max_shard_mb,
        optimizer=not parsed.model_only,
    ):
        print(path)
    return 0
