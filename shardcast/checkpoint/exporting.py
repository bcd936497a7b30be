"""``export``: a full fp32 model for the Hub, and a plain ``torch.optim`` state."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.checkpoint import storage
from shardcast.checkpoint.dcp import Reader, fitting
from shardcast.checkpoint.directory import EXPORTING, chosen, file_in, new_name
from shardcast.checkpoint.region import KeyPath
from shardcast.messages import note_speed, safetensors
from shardcast.optimizer.state import plain_dict
from shardcast.serving.published import Exported
from shardcast.step.update.epilogues import AVERAGE

Paths = dict[str, KeyPath]  # places of stored values, by name
Convert = Callable[[str, str, Tensor], Mapping[str, Tensor]]


def export(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_mb: float = 5000.0,
    optimizer: bool = True,
    weights: str | None = None,
) -> list[Path]:
    """Convert a checkpoint, or the newest one of a directory, to plain PyTorch files.

    The model becomes ``model.safetensors``, or numbered files with an index. Trained parameters are
    in fp32, under every name in ``model.state_dict()``. One parameter is in memory at a time. The
    optimizer becomes ``optimizer.pt``, which the plain torch optimizer loads with
    ``weights_only=True``. Its whole state is in memory while it is written. Several optimizers
    become ``optimizer-0.pt`` and so on, in the order given to ``shard()``.

    Local: one process, without a process group.

    Args:
        directory: directory of a run, or one checkpoint in it.
        out: new or empty directory. It gets all files or none. If the process is killed, delete the
            folder ``.exporting-...`` next to it.
        max_shard_mb: largest size of a file of weights, in MB.
        optimizer: ``False`` writes only the model.
        weights: name of an average (``averages``) to write as the model. Or ``"published"``:
            parameters with a published form become codes and scales (``..._scale_inv``).
            transformers reads them if the model's ``config.json`` includes the contents of
            ``quantization_config.json``, which is written, too.

    Returns:
        The files written.

    Raises:
        FileExistsError: ``out`` is not empty.
        NotADirectoryError: ``out`` or ``directory`` lies below a file.
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpointError: the checkpoint is damaged.
        ValueError: the checkpoint has no average of that name, or a buffer has a dtype that
            safetensors cannot store.
    """
    if not max_shard_mb > 0:
        raise ValueError(f"max_shard_mb: expected a number > 0, got {max_shard_mb!r}")
    began = time.monotonic()
    reader = Reader(chosen(directory))
    convert: Convert = _as_it_is
    with fitting(reader.folder):
        head = reader.object(("shardcast",))
        if weights == "published":
            trained = (name for group in _groups(reader) for name in group["params"])
            convert = exported_forms = Exported(head.get("published"), trained)
        paths = _model_paths(reader, None if weights == "published" else weights)
        paths |= {name: paths[first] for name, first in head["ties"].items() if first in paths}
        paths = {_compat.state_key(name): path for name, path in paths.items()}
    target = Path(os.path.abspath(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"out: {str(target)!r} exists; give a new or an empty directory")
    if file := file_in(target):
        raise NotADirectoryError(
            f"out: expected a new or an empty directory, got a path below the file {str(file)!r}"
        )
    writing = target.with_name(new_name(EXPORTING, target))
    storage.make_directory(writing)
    files = storage.Files()

    try:
        limit = int(max_shard_mb * 2**20)
        written = _export_model(files, reader, paths, writing, limit, convert)
        if weights == "published":
            written.append("quantization_config.json")
            text = json.dumps(exported_forms.config(), indent=2)
            files.write(writing / written[-1], text.encode())
        for name, state in (_optimizer_files(reader, head) if optimizer else {}).items():
            written.append(name)
            with files.create_stream(writing / name, "wb") as file:
                torch.save(state, file)
        files.flush()
        storage.flush(writing)
        files.rename(writing, target)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    exported = [target / name for name in written]
    nbytes = sum(path.stat().st_size for path in exported)
    note_speed(f"exported {str(reader.folder)!r} to {str(target)!r}", nbytes, began)
    return exported


def _optimizer_files(reader: Reader, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return plain optimizers' state dicts by name of file; groups number their parameters."""
    state: dict[str, dict[str, Any]] = {}
    with fitting(reader.folder, ValueError):
        for path in reader.stored:
            # without averages, which a plain optimizer does not have
            if path[:2] == ("optimizer", "state") and not path[3].startswith(AVERAGE):
                state.setdefault(path[2], {})[path[3]] = reader.tensor(path)
        for name, values in head["objects"].items():
            state.setdefault(name, {}).update(values)
        groups = _groups(reader)
        places = head["places"]
        by_place: list[list[Any]] = [[] for _ in range(max(places) + 1)]
        for group, place in zip(groups, places, strict=True):
            by_place[place].append(group)
        names = [f"optimizer-{place}.pt" for place in range(len(by_place))]
        if len(names) == 1:
            names = ["optimizer.pt"]
        return {name: plain_dict(state, own) for name, own in zip(names, by_place, strict=True)}


def _as_it_is(key: str, _name: str, value: Tensor) -> Mapping[str, Tensor]:
    return {key: value}


def _groups(reader: Reader) -> Any:
    """Return the options of the optimizer's groups, with names of parameters."""
    return reader.object(("optimizer", "param_groups"))


def _name_of(path: KeyPath) -> str:
    """Return the name of a parameter or buffer, or of an average's parameter."""
    return str(path[2] if path[0] == "optimizer" else path[1])


def _model_paths(reader: Reader, average: str | None) -> Paths:
    """Return paths of parameters and buffers; for an average only the trained ones."""
    names = {path[1]: path for path in reader.paths if path[0] == "model"}
    if average is None:
        return names
    states = [path for path in reader.paths if path[:2] == ("optimizer", "state")]
    averages = {path[2]: path for path in states if path[3] == AVERAGE + average}
    if not averages:
        stored = {path[3].split(".")[1] for path in states if path[3].startswith(AVERAGE)}
        raise ValueError(
            f"weights: expected the name of an average in the checkpoint, {sorted(stored)}, got "
            f"{average!r}; pass averages={{'ema': 0.999}} to shard() for one"
        )
    return {**names, **averages}


def _export_model(
    files: storage.Files,
    reader: Reader,
    paths: Paths,
    out: Path,
    limit: int,
    convert: Convert,
) -> list[str]:
    """Write the model in files of at most ``limit`` bytes, and return their names.

    Args:
        convert: returns the tensors to write, from a key, a name and a tensor.
    """
    save_file = safetensors().torch.save_file
    shards, filled = list[Paths]([{}]), 0
    for name, path in paths.items():
        with fitting(reader.folder):
            nbytes = reader.stored[path].nbytes
        if shards[-1] and filled + nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = path
        filled += nbytes
    written = ["model.safetensors"]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        written = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
    total, weight_map = 0, dict[str, str]()
    for name, shard in zip(written, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for key, path in shard.items():
            tensors.update(convert(key, _name_of(path), reader.tensor(path)))
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map.update(dict.fromkeys(tensors, name))
        try:
            save_file(tensors, out / name, metadata={"format": "pt"})
        except KeyError as error:  # all that safetensors says is the dtype
            names = [key for key, tensor in tensors.items() if tensor.dtype in error.args]
            raise ValueError(
                f"directory: {names} have {error}, which safetensors cannot store; keep such "
                "buffers as real numbers (torch.view_as_real), or out of checkpoints with "
                "register_buffer(..., persistent=False), and save again"
            ) from error
        storage.flush(out / name)
        del tensors  # before the next file's tensors are read
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": weight_map,
        }
        written.append("model.safetensors.index.json")
        files.write(out / written[-1], json.dumps(index, indent=2).encode())
    return written
