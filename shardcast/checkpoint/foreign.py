"""Checkpoints that other systems wrote: FSDP2 and others through DCP, and DeepSpeed ZeRO-1/2.

Neither system has to be installed, and nothing in their files can run code. They have no
checksums: a file is compared in size only.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.dcp import Reader
from shardcast.checkpoint.loading import Directory, import_from
from shardcast.checkpoint.plain import torch_file
from shardcast.checkpoint.source import Lazy, Source, from_reader, from_tensors

ZERO_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def import_dcp(
    directory: Directory,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    model_key: str = "model",
    optimizer_key: str | None = "optim",
) -> None:
    """Load what ``torch.distributed.checkpoint.save`` wrote, such as the state of FSDP2.

    Every rank of the optimizer's group must call it. Expected is what
    ``dcp.save({"model": ..., "optim": ...})`` makes of the two results of ``get_state_dict``.

    Args:
        directory: with a file ``.metadata``.
        model_key, optimizer_key: the names under which the two were saved; without an
            ``optimizer_key`` the optimizer begins with fresh state.

    Raises:
        ValueError: another model or other groups; names the parameter. Nothing was changed.
        RuntimeError: a file is missing, too short or cannot be read.
    """
    snapshot = Snapshot(model, optimizer)
    folder = Path(os.path.abspath(directory))
    import_from(snapshot, lambda: _from_dcp(folder, model_key, optimizer_key), "import_dcp")


def _from_dcp(folder: Path, model_key: str, optimizer_key: str | None) -> Source:
    where, reader = f"checkpoint {str(folder)!r}", Reader(folder)
    for name, needed in reader.sizes.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size < needed:
            raise RuntimeError(f"{str(path)!r} has {size} bytes, expected at least {needed}")
    source = from_reader(where, reader, model_key, optimizer_key)
    if not source.weights:
        keys = ", ".join(sorted({repr(path[0]) for path in reader.paths})[:5])
        raise ValueError(f"{where}: it has nothing under {model_key!r}, but {keys}; see model_key=")
    if optimizer_key is None:
        return source
    options: dict[int, dict[str, Any]] = {}
    for key in reader.paths:
        if key[:2] == (optimizer_key, "param_groups") and len(key) == 4:
            options.setdefault(int(key[2]), {})[key[3]] = reader.object(key)
    if not options:
        raise ValueError(
            f"{where}: it has no param_groups under {optimizer_key!r}; save the result of "
            "get_state_dict (not flattened), or pass optimizer_key=None to load the model alone"
        )
    return dataclasses.replace(source, groups=[options[number] for number in sorted(options)])


def import_deepspeed(directory: Directory, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Load what DeepSpeed wrote with ZeRO stage 1 or 2, without DeepSpeed.

    Every rank of the optimizer's group must call it. Read is the native format, from any number of
    data-parallel ranks: fp32 weights and moments from ``*_optim_states.pt``, buffers and frozen
    parameters from ``mp_rank_00_model_states.pt``. Files are mapped into memory; the parameter
    being assembled is in it as a whole.

    Args:
        directory: of one tag, or the one above with the file ``latest``.

    Raises:
        ValueError: another model, other groups, tensor parallelism or ZeRO-3. Nothing was changed.
        RuntimeError: a file is missing or cannot be read.
    """
    snapshot = Snapshot(model, optimizer)
    folder = Path(os.path.abspath(directory))
    import_from(snapshot, lambda: _from_deepspeed(folder), "import_deepspeed")


class _Inert:
    """Stands for any class of DeepSpeed: keeps what it was pickled with, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _inert(path: Path) -> list[Any]:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(_Inert, name) for name in names if name.startswith("deepspeed.")]


def _from_deepspeed(folder: Path) -> Source:
    where = f"checkpoint {str(folder)!r}"
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text().strip()
    model = torch_file(folder / "mp_rank_00_model_states.pt", _inert)
    matches = (ZERO_FILE.fullmatch(path.name) for path in folder.iterdir())
    ranks = {int(match[1]): match for match in matches if match}
    expected = int(model["dp_world_size"])
    if int(model.get("mp_world_size", 1)) != 1 or any(int(m[2]) for m in ranks.values()):
        raise ValueError(f"{where}: it is tensor parallel; merge it with DeepSpeed's tools first")
    if sorted(ranks) != list(range(expected)):
        raise RuntimeError(
            f"{where}: expected optimizer states of {expected} ranks, found {sorted(ranks)}"
        )
    files = [torch_file(folder / ranks[rank][0], _inert) for rank in range(expected)]
    shards = [file["optimizer_state_dict"] for file in files]
    if any("single_partition_of_fp32_groups" not in shard for shard in shards):
        raise ValueError(
            f"{where}: expected ZeRO stage 1 or 2; convert stage 3 with DeepSpeed's zero_to_fp32 "
            "and load_plain() the weights"
        )
    weights: dict[str, Tensor | Lazy] = dict(model["module"])
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for number, shapes in enumerate(model["param_shapes"]):
        base = shards[0]["base_optimizer_state"]
        groups.append({**base["param_groups"][number], "params": list(shapes)})
        flats = [shard["single_partition_of_fp32_groups"][number] for shard in shards]
        for name, shape in shapes.items():
            places = [shard["param_slice_mappings"][number].get(name) for shard in shards]
            joined = partial(_joined, f"{where}: parameter {name!r}", places, tuple(shape))
            weights[name] = joined(flats)
            state[name] = {}
            for key, first in base["state"].get(number, {}).items():
                divided = isinstance(first, Tensor) and first.dim() > 0
                pieces_of_shards = [
                    shard["base_optimizer_state"]["state"][number][key] for shard in shards
                ]
                state[name][key] = joined(pieces_of_shards) if divided else first
    return dataclasses.replace(from_tensors(where, weights, state), groups=groups)


def _joined(where: str, places: list[Any], shape: tuple[int, ...], flats: list[Tensor]) -> Lazy:
    """A parameter's weights or moments, of each rank's flat stretch."""
    # Moments are stored without the padding that the weights have at the end.
    pieces = [
        flat[place.start : place.start + place.numel]
        for flat, place in zip(flats, places, strict=True)
        if place is not None
    ]
    numel = sum(piece.numel() for piece in pieces)
    if numel != math.prod(shape):
        raise RuntimeError(f"{where}: {numel} elements, expected {math.prod(shape)}")
    return Lazy(shape, flats[0].dtype, lambda: torch.cat(pieces).view(shape))
