"""Checkpoints edited by hand, messages of the file system, and what a thousand ranks exchange."""

from __future__ import annotations

import hashlib
import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, install, parts, run_world, sharded
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint import storage
from shardcast.checkpoint.access import Snapshot
from shardcast.checkpoint.directory import MANIFEST, MARKER
from shardcast.checkpoint.storage import digest_of
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)


def job(group: Any = None, layers: int = 2, width: int = 5) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = sharded(model, group, param_dtype=torch.bfloat16)
    install(model, 0)
    optimizer.step()
    return model, optimizer


def seal(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the manifest and recompute the sums, as somebody would who means it."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, listed in manifest["files"].items():
        listed["sha256"] = digest_of(folder / name)
        listed["bytes"] = (folder / name).stat().st_size
    data = json.dumps(edit(manifest) or manifest).encode()
    (folder / MANIFEST).write_bytes(data)
    (folder / MARKER).write_text(hashlib.sha256(data).hexdigest())


def point(folder: Path, where: str, offset: int = 0) -> None:
    """Have ``.metadata`` refer to another place for the chunks of one file."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        if place.relative_path == "__0_0.distcp":
            place.relative_path, place.offset = where, place.offset + offset
    path.write_bytes(pickle.dumps(metadata))


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.pop(key) and None


def unlisted(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["files"].pop(name) and None


def listing(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["files"].update({name: manifest["files"]["__0_0.distcp"]})


same: Callable[[dict[str, Any]], Any] = lambda _manifest: None  # noqa: E731
EDITS: dict[str, tuple[str | None, int, Callable[[dict[str, Any]], Any], str]] = {
    "no step": (None, 0, without("step"), "None as 'step', expected int"),
    "a list": (None, 0, lambda _: [1], "cannot be read"),
    "no size": (None, 0, lambda m: m["files"].update({"x": {}}), "'x', no size"),
    "a path above": (None, 0, listing("../x"), r"'\.\./x', which is no plain file name"),
    "an absolute path": (None, 0, listing("/etc/hostname"), "'/etc/hostname', which is no plain"),
    "no metadata": (None, 0, unlisted(".metadata"), r"does not list '\.metadata'"),
    "data not listed": (None, 0, unlisted("__0_0.distcp"), "'__0_0.distcp', which .* not list"),
    "chunks above": ("../x", 0, same, "outside of its directory"),
    "chunks beyond": ("__0_0.distcp", 1 << 40, same, "refers to byte"),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_was_edited_by_hand_is_refused_although_its_sums_hold(tmp_path: Path, what: str):
    where, offset, edit, told = EDITS[what]
    model, optimizer = job()
    for step in (1, 2):
        checkpoint.save(tmp_path, model, optimizer, step=step)
    folder = tmp_path / "step-000000002"
    if where is not None:
        point(folder, where, offset)
    seal(folder, edit)
    before = parts(optimizer)
    for read in (
        lambda: checkpoint.load(folder, model, optimizer),
        lambda: checkpoint.inspect(folder),
        lambda: checkpoint.export(folder, tmp_path / "out"),
    ):
        with pytest.raises(checkpoint.DamagedCheckpointError, match=told):
            read()
    assert_same_bits(parts(optimizer), before)
    with pytest.warns(UserWarning, match="falling back"):
        assert checkpoint.load(tmp_path, model, optimizer).step == 1


def test_chunks_of_others_may_not_lie_outside_of_their_directory_either(tmp_path: Path):
    model, optimizer = job()
    folder = checkpoint.save(tmp_path, model, optimizer, step=1)
    point(folder, "../x")
    with pytest.raises(RuntimeError, match="outside of its directory"):
        checkpoint.import_dcp(folder, model, optimizer, optimizer_key=None)


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_grows_too_large_is_named_with_its_checkpoint_on_all_ranks(
    tmp_path: Path, background: bool
):
    def attempt(group: Any) -> None:
        model, optimizer = job(group, width=64)
        with pytest.raises((OSError, RuntimeError)) as caught:
            if background:
                checkpoint.save_async(tmp_path, model, optimizer, step=7).wait()
            else:
                checkpoint.save(tmp_path, model, optimizer, step=7)
        told = str(caught.value)
        assert "[Errno 27]" in told and f"checkpoint '{tmp_path / 'step-000000007'}'" in told
        assert "_0.distcp'" in told

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        run_world(2, attempt)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".background")]


def test_every_new_directory_is_flushed_up_to_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed, flush = list[Path](), storage.flush
    monkeypatch.setattr(storage, "flush", lambda path: flushed.append(path) or flush(path))
    model, optimizer = job()
    checkpoint.save(tmp_path / "runs" / "a", model, optimizer, step=1)
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"} <= {*flushed}


def test_a_tensor_on_a_device_that_rank_0_lacks_may_be_in_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    size = 13  # of a tensor for which the host stands for a device of rank 1

    def tag(stored: Any) -> str | None:
        return "elsewhere" if stored.nbytes() == 4 * size else None

    def restore(stored: Any, location: str) -> Any:
        assert location != "elsewhere", "no such device"
        return None

    packages = [(0, tag, restore), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", packages)

    def attempt(group: Any) -> None:
        model, optimizer = job(group)
        values = torch.full((size,), 1.0 + group.rank())
        checkpoint.save(tmp_path, model, optimizer, step=1, extra=values, per_rank=values)
        resumed = checkpoint.load(tmp_path, model, optimizer)
        assert [int(ranks_values[0]) for ranks_values in resumed.per_rank] == [1, 2]

    run_world(2, attempt)


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async])
def test_a_directory_that_ranks_do_not_share_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
):
    make = storage.make_directory  # where nobody else sees it
    unseen = lambda path: make(path.parent / "unseen" / path.name)  # noqa: E731
    monkeypatch.setattr(storage, "make_directory", unseen)

    def attempt(group: Any) -> None:
        model, optimizer = job(group)
        with pytest.raises(RuntimeError, match="on a file system that all ranks share"):
            save(tmp_path, model, optimizer, step=1)

    run_world(2, attempt)
    assert [path.name for path in tmp_path.iterdir()] == ["unseen"]


def exchanged(
    world: int, layers: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str], int, int]:
    """The collectives of a save and of a load before values move, the most bytes that one rank
    adds to one of them, and the length of its message to rank 0."""
    folder = base / f"{world:04d}-{layers:02d}"
    folder.mkdir()
    whole = folder / "whole"
    checkpoint.save(whole, *job(None, layers), step=1)
    with fake_world(world, world // 2) as group:
        model, optimizer = job(group, layers)
        del group.log[:]
        checkpoint.save(folder, model, optimizer, step=1, per_rank=torch.zeros(5000))
        saving = list(group.log)
        del group.log[:]
        monkeypatch.setattr(Snapshot, "publish", lambda _snapshot: None)
        checkpoint.load(whole, model, optimizer)
        loading = list(group.log)
    most = max(collective.nbytes // world for collective in saving + loading)
    message = (folder / f"acknowledged-{world // 2}").stat().st_size
    return [c.op for c in saving], [c.op for c in loading], most, message


def test_what_a_rank_exchanges_to_save_and_load_grows_with_neither_ranks_nor_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same collectives at 8 and 1,024 ranks; what one rank adds is small, whatever it saves.

    So each rank receives O(W), and rank 0 reads W messages, none larger than with fewer ranks.
    """
    few = exchanged(8, 40, tmp_path, monkeypatch)
    many = exchanged(1024, 40, tmp_path, monkeypatch)
    assert few[:2] == many[:2] and len(few[0]) < 12 and len(few[1]) < 12
    assert many[2] < 300, "arguments, a digest: neither records nor per_rank"
    assert many[2] == exchanged(1024, 4, tmp_path, monkeypatch)[2]
    assert 20_000 < many[3] <= few[3], "they go to rank 0 alone"
