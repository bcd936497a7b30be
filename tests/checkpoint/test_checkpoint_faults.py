"""Saves that are killed at any point, failing disks, and damaged files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Counting, at_each_point, no_space
from models import advance, assert_same_bits, everything, job, parts, run_world, sharded
from small_runs import DATA, METADATA, flip, loaded, saved_by, truncate
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint import directory, saving, storage
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(120)

# -- interrupted saves ----------------------------------------------------------------------------


def test_a_save_that_is_killed_at_any_point_leaves_the_old_or_the_new_state(tmp_path: Path):
    pair = job(case="tiny")
    checkpoint.save(tmp_path / "first", *pair, step=1)
    first = everything(*pair)
    advance(*pair, 1, 2)
    states = first, everything(*pair)

    def second_save(name: str, reached: Counting) -> Path:
        folder = shutil.copytree(tmp_path / "first", tmp_path / name)
        with at_each_point(reached):
            checkpoint.save(folder, *pair, step=2, keep=1)
        return folder

    counting, steps = Counting(), set()
    second_save("whole", counting)
    assert {"create", "write", "flush", "rename", "acknowledge", "mkdir", "remove"} == {
        point.split()[0] for point in counting.seen
    }
    for number in chosen(counting):
        kill_at(number, partial(second_save, str(number)))
        folder = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a folder with a checkpoint's name is never damaged
            step, state = loaded(folder, case="tiny")
        assert_same_bits(state, states[step - 1])
        steps.add(step)
        checkpoint.save(folder, *pair, step=3)  # the run can continue
        assert hidden(folder) == []
    assert steps == {1, 2}


def test_an_export_that_is_killed_at_any_point_leaves_all_files_or_none(tmp_path: Path):
    checkpoint.save(tmp_path / "run", *job(case="tiny"), step=1)

    def export(name: str, reached: Counting) -> dict[str, bytes]:
        with at_each_point(reached):
            files = checkpoint.export(tmp_path / "run", tmp_path / name)
        return {path.name: path.read_bytes() for path in files}

    counting, complete = Counting(), set()
    whole = export("whole", counting)
    for number in chosen(counting):
        kill_at(number, partial(export, str(number)))
        out = tmp_path / str(number)
        complete.add(out.exists())
        assert not out.exists() or {it.name: it.read_bytes() for it in out.iterdir()} == whole
    assert complete == {False, True}


def kill_at(number: int, act: Callable[[Counting], object]) -> None:
    """Run ``act`` in a child process, which is killed at this point."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            act(Counting(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), number


def chosen(counting: Counting) -> list[int]:
    """Return all points, but only every third of the many equivalent writes of chunks."""
    points = enumerate(counting.seen)
    return [n for n, point in points if not point.startswith("write __") or n % 3 == 0]


def hidden(folder: Path) -> list[str]:
    """Return what failed saves or deletions left behind."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_one_rank_that_fails_at_any_point_makes_all_raise_and_none_hang(tmp_path: Path):
    world = ThreadedWorld(2)
    pairs, others = world.run(job, 1, "tiny"), world.run(job, 0, "tiny")
    states: dict[tuple[int, int], Any] = {}  # keys: step, rank

    def saving(group: Any, step: int) -> str:
        pair = pairs[group.rank()]
        advance(*pair, step, step + 1)
        states[step, group.rank()] = everything(*pair)
        try:
            checkpoint.save(tmp_path, *pair, step=step, keep=1)
        except Exception as error:
            return str(error)
        return ""

    def loading(group: Any) -> tuple[int, Any]:
        pair = others[group.rank()]
        return checkpoint.load(tmp_path, *pair).step, everything(*pair)

    points, committed = Counting(), 1
    assert world.run(saving, 1) == ["", ""]
    with at_each_point(points):
        assert world.run(saving, 2) == ["", ""]
    commit = max(n for n, p in enumerate(points.seen) if p.startswith("rename .writing"))
    for step, number in enumerate(chosen(points), start=3):
        with at_each_point(Counting(number, no_space)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a failed deletion only warns
            messages = world.run(saving, step)
        is_deletion = number > commit and messages == ["", ""]
        assert is_deletion or all("No space" in message for message in messages)
        assert_same_sequence(world.logs)
        # A failed flush of the parent, or a failed acknowledgement, comes after the commit.
        committed = max(directory.steps(tmp_path))
        for rank, (loaded_step, state) in enumerate(world.run(loading)):
            assert loaded_step == committed
            assert_same_bits(state, states[committed, rank])
    assert committed > 3


# -- a disk that cannot be written to -------------------------------------------------------------


def mounted(path: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB if mounting is permitted, else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    is_own = mounted(folder, "size=2m")
    yield folder
    if is_own:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk, except the space for a few directories and names."""
    if not os.path.ismount(disk):
        pytest.skip("mounting a tmpfs is not permitted here")
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - (64 << 10)))
    yield
    filler.unlink()


@contextlib.contextmanager
def full_later(disk: Path) -> Iterator[None]:
    """Fill the disk in a way that the check of free space does not detect."""
    with pytest.MonkeyPatch.context() as patch, full(disk):
        patch.setattr(saving.shutil, "disk_usage", lambda _path: type("", (), {"free": 1e9}))
        yield


@contextlib.contextmanager
def full_to_the_last_byte(disk: Path) -> Iterator[None]:
    """Fill it after rank 0 has written; rank 1 has only the space reserved for its error."""
    if not os.path.ismount(disk):
        pytest.skip("mounting a tmpfs is not permitted here")
    rank_0_wrote, flush = threading.Event(), storage.Files.flush

    class Full(storage.HashingFile):
        def write(self, data: Any) -> int:
            if "__1_" in str(self.name):
                assert rank_0_wrote.wait(30)
                with contextlib.suppress(OSError), open(disk / "filler", "ab", 0) as filler:
                    while True:
                        filler.write(bytes(4096))
            return super().write(data)

    def flushed(files: Any) -> Any:
        sums = flush(files)
        if any(name.startswith("__0_") for name in sums):
            rank_0_wrote.set()
        return sums

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "HashingFile", Full)
        patch.setattr(storage.Files, "flush", flushed)
        yield
    (disk / "filler").unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    is_own = os.path.ismount(disk)
    remount = lambda mode: subprocess.run(  # noqa: E731
        ["mount", "-o", f"remount,{mode}", str(disk)], check=True
    )
    remount("ro") if is_own else (disk / "run").chmod(0o500)  # enough if not root
    try:
        yield
    finally:
        remount("rw") if is_own else (disk / "run").chmod(0o700)


@contextlib.contextmanager
def files_are_limited(disk: Path) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def not_shared(disk: Path) -> Iterator[None]:
    """Make rank 0's folder where other ranks do not see it."""
    make = storage.make_directory
    with pytest.MonkeyPatch.context() as patch:
        unseen = lambda path: make(disk / "unseen" / path.name)  # noqa: E731
        patch.setattr(storage, "make_directory", unseen)
        yield


NAMED = r"checkpoint '.*run/step-000000002' is .*"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "full": (full, "bytes free in"),
    "full once it is written to": (full_later, NAMED + "No space left on device"),
    "full to the last byte": (full_to_the_last_byte, NAMED + "No space left on device"),
    "read-only": (read_only, NAMED + "(Read-only file system|Permission denied)"),
    "limited in the size of files": (files_are_limited, NAMED + r"File too large.*_0\.distcp'"),
    "not shared": (not_shared, "on a file system that all ranks share"),
}


@pytest.mark.parametrize("by", ["save", "save_async"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_cannot_be_written_to_is_named_on_all_ranks_and_the_old_checkpoint_stays(
    disk: Path, fault: str, by: str
):
    (failing, message), run = FAULTS[fault], disk / "run"

    def wide(group: Any = None) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(160, 160)
        optimizer = sharded(model, group, param_dtype=torch.bfloat16)
        return model, optimizer

    world = ThreadedWorld(2)
    pairs = world.run(wide)

    def save(group: Any, step: int) -> None:
        patience = {"timeout": 20.0} if by == "save_async" else {}
        saved_by(by, run, *pairs[group.rank()], step=step, **patience)

    def fail(group: Any) -> None:
        before = everything(*pairs[group.rank()])
        with pytest.raises((OSError, RuntimeError), match=message):
            save(group, 2)
        assert_same_bits(everything(*pairs[group.rank()]), before)

    world.run(save, 1)
    with failing(disk):
        world.run(fail)
    assert checkpoint.latest(run) == run / "step-000000001"
    model, optimizer = wide()
    advance(model, optimizer, 0, 1)
    checkpoint.load(run, model, optimizer)
    assert_same_bits(parts(optimizer), parts(wide()[1]))
    world.run(save, 3)
    assert list(directory.steps(run)) == [3, 1] and hidden(run) == []


def test_all_is_flushed_as_it_is_before_a_checkpoint_or_an_export_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed, named = dict[int, Any](), list[Path]()
    flush, replace = storage.flush, os.replace

    def contents(path: Path) -> Any:
        return sorted(os.listdir(path)) if path.is_dir() else path.stat().st_size

    def noted(path: Path) -> None:
        flushed[path.stat().st_ino] = contents(path)
        flush(path)

    def checked(old: Path, new: Path) -> None:
        if old.is_dir():
            for path in (old, *old.iterdir()):
                assert flushed.get(path.stat().st_ino) == contents(path), path
            named.append(new)
        replace(old, new)

    monkeypatch.setattr(storage, "flush", noted)
    monkeypatch.setattr(os, "replace", checked)
    run, out = tmp_path / "runs" / "a", tmp_path / "out"
    checkpoint.save(run, *job(), step=1)
    assert {folder.stat().st_ino for folder in (tmp_path, run.parent, run)} <= flushed.keys()
    checkpoint.export(run, out, max_shard_mb=1e-3)
    assert named == [run / "step-000000001", out]


@pytest.mark.parametrize("size", [1, storage.LARGE])
def test_a_process_that_can_start_no_thread_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """An ending process cannot start threads, so it hashes without one."""
    refused = list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    pair = job()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "LARGE", size)
        patch.setattr(threading.Thread, "start", start)
        checkpoint.save(tmp_path, *pair, step=1)
    assert bool(refused) == (size == 1)
    step, state = loaded(tmp_path)  # also compares checksums
    assert step == 1
    assert_same_bits(state, everything(*pair))


def no_flush_of(kind: Callable[[int], bool], number: int) -> Callable[[int], None]:
    """Return an ``os.fsync`` that raises for directories or for files."""
    fsync = os.fsync

    def flush(handle: int) -> None:
        if kind(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    return flush


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_cannot_flush_a_directory_is_saved_to_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    run = tmp_path / "run"
    monkeypatch.setattr(storage, "_told", set())
    monkeypatch.setattr(os, "fsync", no_flush_of(stat.S_ISDIR, number))
    pair = job()
    with pytest.warns(UserWarning) as caught:
        checkpoint.save(run, *pair, step=1)
        checkpoint.save_async(run, *pair, step=2).wait()
        checkpoint.export(run, tmp_path / "out")
    (message,) = (str(warning.message) for warning in caught)
    assert f"'{tmp_path}'" in message and "power cut" in message
    assert loaded(run)[0] == 2


@pytest.mark.parametrize(
    ("kind", "number"), [(stat.S_ISDIR, errno.EIO), (stat.S_ISREG, errno.EINVAL)]
)
def test_any_other_flush_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], bool], number: int
):
    monkeypatch.setattr(os, "fsync", no_flush_of(kind, number))
    with pytest.raises(OSError, match="is not saved") as caught:
        checkpoint.save(tmp_path, *job(), step=1)
    assert caught.value.errno == number
    assert checkpoint.latest(tmp_path) is None


# -- files that are damaged afterwards ------------------------------------------------------------

NAMES = [DATA, "__1_0.distcp", METADATA, directory.MANIFEST, directory.MARKER]


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named_and_changes_nothing_and_the_one_before_is_taken(
    made: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    assert loaded(tmp_path)[0] == 2, "the control"
    newest = tmp_path / "step-000000002"
    damage(newest / name)
    model, optimizer = job(steps=5)
    before = everything(model, optimizer)
    with pytest.raises(checkpoint.DamagedCheckpointError) as caught:
        checkpoint.load(newest, model, optimizer)
    message = str(caught.value)
    assert name in message or (name == directory.MARKER and directory.MANIFEST in message)
    assert_same_bits(everything(model, optimizer), before)
    with pytest.warns(UserWarning, match="falling back"):
        assert checkpoint.latest(tmp_path).name == "step-000000001"
    with pytest.warns(UserWarning, match="falling back"):
        assert checkpoint.load(tmp_path, model, optimizer).step == 1
    with pytest.warns(UserWarning, match="set aside"):
        checkpoint.save(tmp_path, model, optimizer, step=2)
    assert checkpoint.latest(tmp_path).name == "step-000000002"


@pytest.mark.parametrize(
    ("damage", "name"), [(truncate, DATA), (flip, DATA), (Path.unlink, directory.MARKER)]
)
def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(
    tmp_path: Path, damage: Callable[[Path], None], name: str
):
    pair = job(case="tiny")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, *pair, step=step)
    damage(tmp_path / "step-000000003" / name)
    checkpoint.save(tmp_path, *pair, step=4, keep=2)
    assert list(directory.steps(tmp_path)) == [4, 3, 2]
    checkpoint.save(tmp_path, *pair, step=5, keep=2)
    assert list(directory.steps(tmp_path)) == [5, 4]


# -- one rank that cannot load --------------------------------------------------------------------


def test_a_manifest_that_one_rank_cannot_read_again_makes_all_raise(
    made: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest_of, ranks, calls = directory.manifest_of, dict[int, int](), list[int]()

    def read(folder: Path) -> Any:
        rank = ranks[threading.get_ident()]
        calls.append(rank)
        if rank == 1 and calls.count(1) == 2:
            raise OSError(116, "Stale file handle")
        return manifest_of(folder)

    monkeypatch.setattr(directory, "manifest_of", read)

    def attempt(group: Any) -> None:
        ranks[threading.get_ident()] = group.rank()
        model, optimizer = job(group)
        before = everything(model, optimizer)
        with pytest.raises((OSError, RuntimeError), match="Stale file handle"):
            checkpoint.load(made, model, optimizer)
        assert_same_bits(everything(model, optimizer), before)

    run_world(2, attempt)


class Picky(nn.Linear):
    """Has extra state, which ``refuses`` makes it refuse."""

    state: Any = 1
    refuses = False

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise RuntimeError("not mine")


def test_extra_state_that_cannot_be_saved_or_is_refused_on_a_rank_makes_all_raise(tmp_path: Path):
    def attempt(group: Any) -> None:
        model = Picky(2, 2)
        model.refuses = group.rank() == 1
        optimizer = sharded(model, group)
        model.state = Path("/")  # could be saved, but not read back with weights_only
        with pytest.raises(ValueError, match=r"what get_extra_state\(\) .* pathlib.*Path that"):
            checkpoint.save(tmp_path, model, optimizer, step=1)
        assert not list(tmp_path.iterdir())
        model.state = 1
        checkpoint.save(tmp_path, model, optimizer, step=1)
        with pytest.raises(RuntimeError, match=r"not mine.*load again"):
            checkpoint.load(tmp_path, model, optimizer)

    run_world(2, attempt)
