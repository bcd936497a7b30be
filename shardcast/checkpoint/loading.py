"""``load`` and ``resume``: verify, compare, and only then change memory."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcast.checkpoint import directory as folders
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.dcp import DamagedCheckpointError, Reader, Stored, fitting
from shardcast.checkpoint.directory import Manifest
from shardcast.checkpoint.saving import finish
from shardcast.checkpoint.source import StateSource, from_reader
from shardcast.launched import is_first_process
from shardcast.messages import LOG, note_speed

Directory = str | os.PathLike[str]


@dataclass(frozen=True)
class Resumed:
    """Description of a loaded checkpoint.

    Attributes:
        step: number of the step after which it was saved.
        extra: ``extra`` of :func:`save`.
        per_rank: ``per_rank`` of each rank that saved, in rank order.
        path: folder of the checkpoint.
    """

    step: int
    extra: Any
    per_rank: list[Any]
    path: Path


def load(
    directory: Directory,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    only: str | Sequence[str] | None = None,
    state: bool = True,
) -> Resumed:
    """Load the newest intact checkpoint of a directory, or one checkpoint by its path.

    It first waits for saves that this job's :func:`save_async` has begun there.

    The mesh, partition, packs and ``param_dtype`` may differ from the saved ones. Masters, state
    and step counts are restored bit for bit. Everything is verified and compared before anything in
    memory changes. It needs extra host memory for the state of one pack's span.

    Collective: every rank of the optimizer's group.

    Args:
        directory: directory of a run, or one checkpoint in it.
        model: model that was passed to :func:`shardcast.shard`.
        optimizer: what :func:`shardcast.shard` returned.
        only: glob patterns of parameter and buffer names to load, for a model with a new head or
            new layers. Everything else keeps its values and state. Options of the groups and the
            loss scale are not loaded.
        state: load the optimizer's state. ``False`` loads only weights and buffers. Their optimizer
            state starts fresh, and options of the groups are not loaded.

    Returns:
        Step, ``extra``, ``per_rank`` and path of the loaded checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint, or not the named one; see :func:`resume`.
        NotADirectoryError: ``directory`` is a file, or lies below one.
        DamagedCheckpointError: the named checkpoint, or every one, is damaged; names the file.
        ValueError: the checkpoint is of another model or optimizer, or a pattern of ``only``
            matches nothing. Nothing has changed.

    Example::

        checkpoint.load("runs/base", model, optimizer, only=["body.*"], state=False)
    """
    patterns = (only,) if isinstance(only, str) else only and tuple(only)
    resumed = _resume(directory, model, optimizer, patterns, state)
    if resumed is None:
        raise FileNotFoundError(
            f"directory: no committed checkpoint in {str(directory)!r}; check the path, or use "
            "resume() if the run may be new"
        )
    return resumed


def resume(directory: Directory, model: Model, optimizer: torch.optim.Optimizer) -> Resumed | None:
    """Load like :func:`load`, but return ``None`` if the directory has no checkpoint yet.

    Collective: every rank of the optimizer's group.

    Args:
        directory: directory of a run, or one checkpoint in it.
        model: model that was passed to :func:`shardcast.shard`.
        optimizer: what :func:`shardcast.shard` returned.

    Returns:
        Step, ``extra``, ``per_rank`` and path, or ``None``.

    Raises:
        FileNotFoundError, NotADirectoryError, DamagedCheckpointError, ValueError: see :func:`load`.
    """
    resumed = _resume(directory, model, optimizer, None, True)
    if resumed is None and is_first_process():
        LOG.info("resume: no checkpoint in %r, so this is a new run", str(directory))
    return resumed


def _resume(
    directory: Directory,
    model: Model,
    optimizer: torch.optim.Optimizer,
    patterns: Sequence[str] | None,
    with_state: bool,
) -> Resumed | None:
    path = folders.absolute(directory)
    is_whole = patterns is None and with_state
    began = time.monotonic()
    snapshot = Snapshot(model, optimizer)
    snapshot.meet("load")
    snapshot.together(lambda: finish(path), "load")  # before any rank looks for the newest
    folder = _choose(snapshot, path)
    if folder is None:
        return None

    def compared() -> tuple[StateSource, Resumed, Manifest]:
        manifest, reader = folders.manifest_of(folder), Reader(folder)
        with fitting(folder):
            source = _ours(folder, reader)
        if not is_whole:
            source = part_of(snapshot, source, patterns, with_state)
        with fitting(folder):
            source = compare(snapshot, source)
        extra, per_rank = reader.object(("extra",)), reader.object(("per_rank",))
        return source, Resumed(manifest.step, extra, per_rank, folder), manifest

    source, resumed, manifest = snapshot.together(compared, "load")
    take(snapshot, source, "load")
    if is_whole:
        loaded = snapshot.digest()
        if manifest.digest not in (None, loaded) and manifest.digest_of == snapshot.forms():
            raise DamagedCheckpointError(
                f"checkpoint {str(folder)!r}: the digest of masters and state was "
                f"{manifest.digest} when it was saved and is {loaded} after loading, although "
                "the files have the right checksums: memory or a copy was corrupted, then or "
                "now; load it again, or load an earlier checkpoint"
            )
        snapshot.note_loaded(folder, loaded)
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
    """Return the sound checkpoint to load; each rank verifies a share of the files."""

    def check(folder: Path) -> DamagedCheckpointError | None:
        share = snapshot.comm.rank, snapshot.comm.size
        errors = snapshot.collect(lambda: folders.damage(folder, *share), "load")
        return next((error for error in errors if error is not None), None)

    def look() -> tuple[list[Path], str]:
        found = list(folders.steps(path).values())
        state = path.exists(), path.is_file(), folders.is_checkpoint(path)
        return found, repr((*state, list(map(str, found))))

    found, seen = snapshot.together(look, "load")
    if not snapshot.comm.agree(seen, snapshot.device, "load"):
        raise RuntimeError(
            f"directory: the ranks see different checkpoints in {str(path)!r}; it must be on a "
            "file system that all ranks share"
        )
    return folders.choose(path, found, check)


def part_of(
    snapshot: Snapshot, source: StateSource, patterns: Sequence[str] | None, with_state: bool
) -> StateSource:
    """Return the requested part of ``source``: matching names, with or without state. Local.

    Raises:
        TypeError: ``patterns`` are not strings.
        ValueError: a pattern matches no name.
    """
    names = sorted({*source.weights} | {*snapshot.inventory.shapes})
    for pattern in patterns or ():
        if not isinstance(pattern, str):
            raise TypeError(
                f"only: expected glob patterns of names, got {type(pattern).__name__} {pattern!r}"
            )
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"only: pattern {pattern!r} matches no parameter or buffer of this model or of "
                f"{source.where}, such as {names[0]!r}; check its spelling"
            )
    if not with_state:
        source = dataclasses.replace(source, state={}, optimizer=None)
    source = dataclasses.replace(source, groups=None, scaler=None)
    if patterns is None:
        return source
    chosen = frozenset(name for p in patterns for name in fnmatch.filter(names, p))
    return dataclasses.replace(
        source,
        chosen=chosen,
        weights={name: stored for name, stored in source.weights.items() if name in chosen},
        state={name: values for name, values in source.state.items() if name in chosen},
        extra_state=None,
    )


def compare(snapshot: Snapshot, source: StateSource) -> StateSource:
    """Return ``source`` if all of it belongs to this model and optimizer. Local.

    Raises:
        ValueError: it does not; names the parameter.
    """
    where, inventory = source.where, snapshot.inventory
    optimizer, expected = snapshot.head()["optimizer"], inventory.shapes
    build = (
        "build the model as it was when this was saved, or load the weights that both have with "
        "load(..., only=patterns, state=False)"
    )
    if source.chosen is not None:
        expected = {name: shape for name, shape in expected.items() if name in source.chosen}
        build = "exclude what differs with only=, which takes name patterns"
    stored = source.weights.keys() - inventory.ties.keys()
    for what, names in (
        ("lacks", expected.keys() - stored),
        ("has, and this model does not have,", stored - expected.keys()),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:5]))
            raise ValueError(
                f"{where}: it {what} {len(names)} parameters or buffers, among them {shown}; "
                f"{build}"
            )
    for name, shape in expected.items():
        if source.weights[name].shape != shape:
            raise ValueError(
                f"{where}: parameter {name!r} has shape {source.weights[name].shape}, expected "
                f"{tuple(shape)}; {build}"
            )
    if source.optimizer not in (None, optimizer):
        raise ValueError(
            f"{where}: it has the state of {source.optimizer}, expected {optimizer}; use "
            "the same optimizer, or load(..., state=False), which starts with fresh state"
        )
    if source.groups is not None:
        stored_groups = [group["params"] for group in source.groups]
        if len(inventory.groups) != len(stored_groups):
            raise ValueError(
                f"{where}: expected {len(inventory.groups)} param_groups, got "
                f"{len(stored_groups)}; build the optimizer with the same groups, or load the "
                "weights alone"
            )
        for number, groups in enumerate(zip(inventory.groups, stored_groups, strict=True)):
            if differing := {*groups[0]} ^ {*groups[1]}:
                raise ValueError(
                    f"{where}: parameter {min(differing)!r} is in param_group {number} of the "
                    f"{'optimizer' if min(differing) in groups[0] else 'checkpoint'} only; build "
                    "the optimizer with the same groups"
                )
    extra_state = inventory.extra if source.extra_state is None else source.extra_state
    if differing := extra_state.keys() ^ inventory.extra.keys():
        name = min(differing)
        raise ValueError(
            f"{where}: extra state {name!r} is in the "
            f"{'model' if name in inventory.extra else 'checkpoint'} only; build the model as it "
            "was when this was saved"
        )
    buffers = {name for name, _ in inventory.buffers}
    for name, values in source.state.items():
        if name in buffers:  # averages of them, which go where they are asked for
            continue
        if name not in inventory.trained:
            raise ValueError(
                f"{where}: it has optimizer state of {name!r}, which is not trained here; add the "
                "parameter to the optimizer, or load the weights alone"
            )
        for key, value in values.items():
            shape = value.shape if isinstance(value, Stored) else ()
            if shape and shape != expected[name] and inventory.trained[name]:
                raise ValueError(
                    f"{where}: {key!r} of parameter {name!r} has shape {shape}, expected "
                    f"{expected[name]}; such state cannot be split evenly; use partition 'whole'"
                )
    return source


def take(snapshot: Snapshot, source: StateSource, call: str) -> None:
    """Write compared values into memory and make all ranks equal. Collective: every rank.

    Raises:
        RuntimeError: an average is in the model, or the source became unreadable. Memory may have
            changed only in the second case.
    """
    snapshot.refuse_inside(call)

    def put() -> None:
        snapshot.take_options(source)
        snapshot.take_tensors(source)

    try:
        snapshot.together(put, call)
    except Exception as error:
        raise RuntimeError(
            f"{source.where} became unreadable while it was loaded ({error}); model and "
            "optimizer are only partly loaded: load again before you train"
        ) from error
    snapshot.publish()
