"""Checkpoints that other systems wrote: FSDP2 and others through DCP, and DeepSpeed ZeRO-1/2.

Neither system has to be installed, and nothing in their files can run code. They have no
checksums: a file is compared in size only.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from shardcast.checkpoint.access import Held
from shardcast.checkpoint.dcp import METADATA, Reader, _Unpickler
from shardcast.checkpoint.plain import Plain, check, reached, take

Directory = str | os.PathLike[str]
ZERO_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def import_dcp(
    directory: Directory,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    model_key: str = "model",
    optimizer_key: str | None = "optim",
) -> None:
    """Load what ``torch.distributed.checkpoint.save`` wrote, such as the state of FSDP2.

    Every rank of the optimizer's group must call it. Expected is what
    ``dcp.save({"model": ..., "optim": ...})`` makes of the two results of ``get_state_dict``.
    A whole tensor is in memory at a time.

    Args:
        directory: with a file ``.metadata``.
        model_key, optimizer_key: the names under which the two were saved; without an
            ``optimizer_key`` the optimizer begins with fresh state.

    Raises:
        ValueError: another model or other groups; names the parameter. Nothing was changed.
        RuntimeError: a file is missing, too short or cannot be read.
    """
    held = Held(model, optimizer)
    folder = Path(os.path.abspath(directory))
    found: list[Plain] = []

    def read() -> None:
        plain = _from_dcp(folder, model_key, optimizer_key)
        check(held, plain)
        found.append(plain)

    held.together(read, reached)
    take(held, found[0])


class _ForeignUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        harmless = {
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("pathlib", "Path"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        }
        if (module, name) in harmless:
            return pickle.Unpickler.find_class(self, module, name)
        return super().find_class(module, name)


class _ForeignReader(Reader):
    """DCP's own files: their paths hold numbers too, and their metadata says where they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with open(folder / METADATA, "rb") as file:
                metadata = _ForeignUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise RuntimeError(
                f"{str(folder / METADATA)!r} cannot be read as DCP metadata: {error}"
            ) from error
        self._metadata: Metadata = metadata
        self._entries = metadata.state_dict_metadata
        paths = metadata.planner_data or {}
        self.paths: dict[Any, str] = {tuple(paths.get(key, (key,))): key for key in self._entries}
        self._check_files()

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for place in (self._metadata.storage_data or {}).values():
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        for name, end in needed.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else 0
            if size < end:
                raise RuntimeError(f"{str(path)!r} has {size} bytes, expected at least {end}")


class _Lazy(Mapping[str, Any]):
    """Values that are read, or put together, each time they are asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _reading(reader: Reader, paths: Mapping[str, Any]) -> _Lazy:
    def read(path: Any) -> Any:
        return reader.object(path) if reader.shape(path) is None else reader.tensor(path)

    return _Lazy({name: partial(read, path) for name, path in paths.items()})


def _from_dcp(folder: Path, model_key: str, optimizer_key: str | None) -> Plain:
    where = f"checkpoint {str(folder)!r}"
    reader = _ForeignReader(folder)
    weights = {path[1]: path for path in reader.paths if path[0] == model_key and len(path) == 2}
    if not weights:
        keys = ", ".join(sorted({repr(path[0]) for path in reader.paths})[:5])
        raise ValueError(f"{where}: it has nothing under {model_key!r}, but {keys}; see model_key=")
    if optimizer_key is None:
        return Plain(where, _reading(reader, weights), {}, None)
    state: dict[str, dict[str, Any]] = {}
    options: dict[int, dict[str, Any]] = {}
    for path in reader.paths:
        if path[:2] == (optimizer_key, "state") and len(path) == 4:
            state.setdefault(path[2], {})[path[3]] = path
        elif path[:2] == (optimizer_key, "param_groups") and len(path) == 4:
            options.setdefault(int(path[2]), {})[path[3]] = reader.object(path)
    if not options:
        raise ValueError(
            f"{where}: it has no param_groups under {optimizer_key!r}; save the result of "
            "get_state_dict (not flattened), or pass optimizer_key=None to load the model alone"
        )
    lazy = {name: _reading(reader, keys) for name, keys in state.items()}
    groups = [options[number] for number in sorted(options)]
    return Plain(where, _reading(reader, weights), lazy, groups)


def import_deepspeed(
    directory: Directory, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
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
    held = Held(model, optimizer)
    folder = Path(os.path.abspath(directory))
    found: list[Plain] = []

    def read() -> None:
        plain = _from_deepspeed(folder)
        check(held, plain)
        found.append(plain)

    held.together(read, reached)
    take(held, found[0])


class _Inert:
    """Stands for any class of DeepSpeed: keeps what it was pickled with, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _zero_file(path: Path) -> Any:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        strange = [name for name in names if not name.startswith("deepspeed.")]
        if strange:
            raise pickle.UnpicklingError(f"it wants {strange[0]}")
        allowed: list[Any] = [(_Inert, name) for name in names]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"{str(path)!r} cannot be read: {reason}") from error


def _from_deepspeed(folder: Path) -> Plain:
    where = f"checkpoint {str(folder)!r}"
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text().strip()
    model = _zero_file(folder / "mp_rank_00_model_states.pt")
    matches = (ZERO_FILE.fullmatch(path.name) for path in folder.iterdir())
    ranks = {int(match[1]): match for match in matches if match}
    expected = int(model["dp_world_size"])
    if int(model.get("mp_world_size", 1)) != 1 or any(int(m[2]) for m in ranks.values()):
        raise ValueError(f"{where}: it is tensor parallel; merge it with DeepSpeed's tools first")
    if sorted(ranks) != list(range(expected)):
        raise RuntimeError(
            f"{where}: expected optimizer states of {expected} ranks, found {sorted(ranks)}"
        )
    shards = [_zero_file(folder / ranks[r][0])["optimizer_state_dict"] for r in range(expected)]
    if any("single_partition_of_fp32_groups" not in shard for shard in shards):
        raise ValueError(
            f"{where}: expected ZeRO stage 1 or 2; convert stage 3 with DeepSpeed's zero_to_fp32 "
            "and load_plain() the weights"
        )
    weights: dict[str, Callable[[], Any]] = {
        name: partial(_itself, value) for name, value in model["module"].items()
    }
    state: dict[str, Mapping[str, Any]] = {}
    groups = []
    for number, shapes in enumerate(model["param_shapes"]):
        base = shards[0]["base_optimizer_state"]
        groups.append({**base["param_groups"][number], "params": list(shapes)})
        for name, shape in shapes.items():
            make = partial(_assembled, where, shards, number, name, torch.Size(shape))
            weights[name] = partial(make, None)
            state[name] = _Lazy({key: partial(make, key) for key in base["state"].get(number, {})})
    return Plain(where, _Lazy(weights), state, groups)


def _itself(value: Any) -> Any:
    return value


def _assembled(
    where: str,
    shards: list[dict[str, Any]],
    group: int,
    name: str,
    shape: torch.Size,
    key: str | None,
) -> Any:
    """A parameter's fp32 weights (``key`` is ``None``) or state, from each rank's flat stretch."""
    pieces = []
    for shard in shards:
        weights: Tensor = shard["single_partition_of_fp32_groups"][group]
        address = shard["param_slice_mappings"][group].get(name)
        if address is None or not address.numel:
            continue
        flat = weights if key is None else shard["base_optimizer_state"]["state"][group][key]
        if not isinstance(flat, Tensor) or flat.dim() == 0:
            return flat  # a step: the same for the whole group
        # Moments are stored without the padding that the weights have at the end.
        pieces.append(flat[address.start : address.start + address.numel])
    whole = torch.cat(pieces) if pieces else torch.empty(0)
    if whole.numel() != shape.numel():
        raise RuntimeError(
            f"{where}: {key or 'weights'} of parameter {name!r} has {whole.numel()} elements, "
            f"expected {shape.numel()}"
        )
    return whole.view(shape)
