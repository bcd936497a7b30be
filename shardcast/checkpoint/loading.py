"""``load`` and ``resume``: verify, compare, and only then change anything."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcast.checkpoint import directory as folders
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.dcp import DamagedCheckpointError, Reader, Stored, fitting
from shardcast.checkpoint.directory import Manifest
from shardcast.checkpoint.source import StateSource, from_reader
from shardcast.messages import note_speed

Directory = str | os.PathLike[str]


@dataclass(frozen=True)
class Resumed:
    """A description of what was loaded.

    Attributes:
        step: number of the step after which it was saved.
        extra: as :func:`save` took it.
        per_rank: what each of the saving ranks gave, in their order.
        path: of the checkpoint.
    """

    step: int
    extra: Any
    per_rank: list[Any]
    path: Path


def load(directory: Directory, model: Model, optimizer: torch.optim.Optimizer) -> Resumed:
    """Load the newest sound checkpoint of a directory, or the one that is named.

    Every rank of the optimizer's group must call it; it returns on all of them, or raises on all.
    The grid of ranks, partition, packs and ``param_dtype`` may differ from the saved ones: masters,
    state and step counts are the same to the bit. Everything is verified and compared before
    anything in memory changes. Extra memory is the state of one pack's span, on the host.

    Args:
        directory: of a run, or one checkpoint in it.

    Raises:
        FileNotFoundError: there is no checkpoint, or not the named one; see :func:`resume`.
        DamagedCheckpointError: the named one, or every one, is damaged; names file and parameters.
        ValueError: it is one of another model or optimizer; nothing was changed.
    """
    resumed = resume(directory, model, optimizer)
    if resumed is None:
        raise FileNotFoundError(
            f"directory: no committed checkpoint in {str(directory)!r}; check the path, or use "
            "resume() where a run may be new"
        )
    return resumed


def resume(directory: Directory, model: Model, optimizer: torch.optim.Optimizer) -> Resumed | None:
    """Load, or return ``None`` where a directory has no checkpoint yet. Collective."""
    began = time.monotonic()
    snapshot = Snapshot(model, optimizer)
    snapshot.meet("load")
    folder = _choose(snapshot, Path(os.path.abspath(directory)))
    if folder is None:
        return None

    def compared() -> tuple[StateSource, Resumed, Manifest]:
        manifest, reader = folders.manifest_of(folder), Reader(folder)
        with fitting(folder):
            source = compare(snapshot, _ours(folder, reader))
        extra, per_rank = reader.object(("extra",)), reader.object(("per_rank",))
        return source, Resumed(manifest.step, extra, per_rank, folder), manifest

    source, resumed, manifest = snapshot.together(compared, "load")
    take(snapshot, source, "load")
    if manifest.digest is not None and manifest.digest_of == snapshot.forms():
        loaded = snapshot.digest()["digest"]
        if loaded != manifest.digest:
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: masters and state had the digest {manifest.digest} "
                f"when it was saved and have {loaded} now that it is loaded, though its files have "
                "their checksums: memory or a copy lost bits, then or now; load it again, or the "
                "one before"
            )
    if snapshot.comm.rank == 0:
        note_speed(f"loaded {str(folder)!r}", manifest.nbytes, began)
    return resumed


def _ours(folder: Path, reader: Reader) -> StateSource:
    head = reader.object(("shardcast",))
    source = from_reader(f"checkpoint {str(folder)!r}", reader)
    names = dict.fromkeys([*source.state, *head["objects"]])
    return dataclasses.replace(
        source,
        state={n: {**source.state.get(n, {}), **head["objects"].get(n, {})} for n in names},
        groups=reader.object(("optimizer", "param_groups")),
        exact=True,
        **{key: head[key] for key in ("optimizer", "scaler", "extra_state")},
    )


def _choose(snapshot: Snapshot, path: Path) -> Path | None:
    """The sound checkpoint to load; each rank verifies a share of the files."""

    def check(folder: Path) -> DamagedCheckpointError | None:
        share = snapshot.comm.rank, snapshot.comm.size
        errors = snapshot.collect(lambda: folders.damage(folder, *share), "load")
        return next((error for error in errors if error is not None), None)

    def look() -> str:
        state = path.exists(), path.is_file(), folders.is_checkpoint(path)
        return repr((*state, list(map(str, folders.steps(path).values()))))

    if not snapshot.comm.agree(snapshot.together(look, "load"), snapshot.device, "load"):
        raise RuntimeError(
            f"directory: the ranks see different checkpoints in {str(path)!r}; it must be on a "
            "file system that all ranks share"
        )
    return folders.choose(path, check, loud=snapshot.comm.rank == 0)


def compare(snapshot: Snapshot, source: StateSource) -> StateSource:
    """``source``, if all of it belongs to this model and optimizer. Local.

    Raises:
        ValueError: names the parameter.
    """
    where, inventory = source.where, snapshot.inventory
    optimizer, expected = snapshot.head()["optimizer"], inventory.shapes
    stored = source.weights.keys() - inventory.ties.keys()
    for what, names in (
        ("lacks", expected.keys() - stored),
        ("has, and this model does not have,", stored - expected.keys()),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:5]))
            raise ValueError(
                f"{where}: it {what} {len(names)} parameters or buffers, among them {shown}; "
                "build the model as it was when this was saved"
            )
    for name, shape in expected.items():
        if source.weights[name].shape != shape:
            raise ValueError(
                f"{where}: parameter {name!r} has shape {source.weights[name].shape}, expected "
                f"{tuple(shape)}; build the model as it was when this was saved"
            )
    if source.optimizer not in (None, optimizer):
        raise ValueError(
            f"{where}: it has the state of {source.optimizer}, expected {optimizer}; use "
            "the same optimizer, or export() the weights and start with fresh state"
        )
    if source.groups is not None:
        stored_groups = [group["params"] for group in source.groups]
        if len(inventory.groups) != len(stored_groups):
            raise ValueError(
                f"{where}: expected {len(inventory.groups)} param_groups, got "
                f"{len(stored_groups)}; build the optimizer with the same groups"
            )
        for number, groups in enumerate(zip(inventory.groups, stored_groups, strict=True)):
            if differing := {*groups[0]} ^ {*groups[1]}:
                raise ValueError(
                    f"{where}: parameter {min(differing)!r} is in param_group {number} on one side "
                    "only; build the optimizer with the same groups"
                )
    extra_state = inventory.extra if source.extra_state is None else source.extra_state
    if differing := extra_state.keys() ^ inventory.extra.keys():
        raise ValueError(f"{where}: extra state {min(differing)!r} is on one side only")
    buffers = {name for name, _ in inventory.buffers}
    for name, values in source.state.items():
        if name in buffers:  # averages of them, which go where they are asked for
            continue
        if name not in inventory.trained:
            raise ValueError(
                f"{where}: it has optimizer state of {name!r}, which is not trained here"
            )
        for key, value in values.items():
            shape = value.shape if isinstance(value, Stored) else ()
            if shape and shape != expected[name] and inventory.trained[name]:
                raise ValueError(
                    f"{where}: {key!r} of parameter {name!r} has shape {shape}, expected "
                    f"{expected[name]}; such a state cannot be cut, use partition 'whole'"
                )
    return source


def take(snapshot: Snapshot, source: StateSource, call: str) -> None:
    """Put compared values into memory and make all ranks equal. Collective.

    Raises:
        RuntimeError: an average is in the model; or the source became unreadable: only then
            something has been changed.
    """
    snapshot.refuse_averaged(call)

    def put() -> None:
        snapshot.take_options(source)
        snapshot.take_tensors(source)

    try:
        snapshot.together(put, call)
    except Exception as error:
        raise RuntimeError(
            f"{source.where} could no longer be read after it had been compared ({error}); model "
            "and optimizer are loaded in part: load again before training on"
        ) from error
    snapshot.publish()
