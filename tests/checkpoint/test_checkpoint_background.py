"""Background saves: same bits, never two at a time, errors on all ranks."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import models
import pytest
from faults import no_space, watch
from models import advance, assert_same_bits, on_each_rank, parts, run_world, values, whole
from patience import patience

from shardcast import checkpoint
from shardcast.checkpoint import directory as folders
from shardcast.checkpoint import saving
from shardcast.checkpoint.background import end, save_async
from shardcast.checkpoint.directory import BACKGROUND
from shardcast.checkpoint.directory import steps as checkpoints
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld


class Gate:
    """Delays writes of data until it is open; can also make one rank fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.fails = ""  # name of the file that cannot be created

    def __call__(self, point: str, path: str) -> None:
        if point == "create" and BACKGROUND in path and path.endswith(".distcp"):
            assert self.open.wait(20)
            if self.fails and self.fails in path:
                raise OSError(28, "No space left on device", path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The gate of all saves of the test."""
    watch(monkeypatch, gate := Gate())
    return gate


job = functools.partial(models.job, steps=0, case="gpt")


def saving_beside(group: Any, folder: str, gate: Gate) -> Any:
    model, optimizer = job(group)
    advance(model, optimizer, 0, 2)
    before = parts(optimizer), values(model)
    save = save_async(folder, model, optimizer, step=2, extra={"a": 1}, per_rank=group.rank())
    assert not save.done() and not save.path.exists()
    advance(model, optimizer, 2, 5)  # must not get into the checkpoint
    gate.open.set()
    assert save.wait().exists()
    return before


def loading(group: Any, folder: str) -> Any:
    model, optimizer = job(group, seed=7)
    resumed = checkpoint.load(folder, model, optimizer)
    assert (resumed.step, resumed.extra, resumed.per_rank) == (2, {"a": 1}, [0, 1, 2])
    return parts(optimizer), values(model)


def test_steps_during_a_save_are_not_in_it(tmp_path: Path, gate: Gate):
    before, _ = run_world(3, saving_beside, str(tmp_path), gate)
    after, _ = run_world(2, loading, str(tmp_path))
    assert_same_bits(whole(r[0] for r in after), whole(r[0] for r in before))
    assert_same_bits(after[0][1], before[0][1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000002"]
    assert not list((tmp_path / "step-000000002").glob("acknowledged*"))


def test_a_second_save_waits_for_the_first_which_others_leave_alone(tmp_path: Path, gate: Gate):
    pair = job()
    first = save_async(tmp_path, *pair, step=1)
    checkpoint.save(tmp_path, *pair, step=2)
    timer = threading.Timer(0.2, gate.open.set)
    timer.start()
    third = save_async(tmp_path, *pair, step=3, keep=2)
    assert first.done() and first.path.exists()
    third.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000002", "step-000000003"]
    timer.join()


def sharding_anew(group: Any, folder: str, gate: Gate) -> None:
    model, optimizer = job(group)
    first = save_async(folder, model, optimizer, step=1)
    optimizer.close()
    if group.rank() == 0:
        threading.Timer(0.3, gate.open.set).start()
    second = save_async(folder, *job(group, seed=7), step=2)
    assert first.wait().exists() and second.wait().exists()


def test_a_save_of_another_optimizer_into_the_directory_is_waited_for(tmp_path: Path, gate: Gate):
    """Otherwise it would take the folder being written for the leftover of a killed run."""
    run_world(2, sharding_anew, str(tmp_path), gate)
    assert sorted(checkpoints(tmp_path)) == [1, 2]


def test_saves_of_two_optimizers_follow_each_other_at_once(tmp_path: Path):
    """The first save may not have started on all ranks when the second begins."""

    def run(group: Any) -> None:
        first, second = job(group), job(group, seed=7)
        saves = [
            save_async(tmp_path, *pair, step=step) for step, pair in enumerate([first, second])
        ]
        assert all(save.wait().exists() for save in saves)

    ThreadedWorld(3, timeout=20).run(run)
    assert sorted(checkpoints(tmp_path)) == [0, 1]


def loading_beside(group: Any, folder: str, gate: Gate, restarts: bool) -> int:
    model, optimizer = job(group)
    checkpoint.save(folder, model, optimizer, step=1)
    save_async(folder, model, optimizer, step=2)
    if restarts:
        optimizer.close()
        del model, optimizer
        gc.collect()
        model, optimizer = job(group, seed=7)
    if group.rank() == 0:
        threading.Timer(0.3, gate.open.set).start()
    return checkpoint.load(folder, model, optimizer).step


@pytest.mark.parametrize("restarts", [False, True])
def test_a_load_waits_for_the_running_save(tmp_path: Path, gate: Gate, restarts: bool):
    steps, _ = run_world(2, loading_beside, str(tmp_path), gate, restarts)
    assert steps == [2, 2]


def saving_again(group: Any, folder: str, gate: Gate) -> Any:
    model, optimizer = job(group)
    earlier = save_async(folder, model, optimizer, step=1, overwrite=True)
    advance(model, optimizer, 0, 1)
    if group.rank() == 0:
        threading.Timer(0.3, gate.open.set).start()
    checkpoint.save(folder, model, optimizer, step=1, overwrite=True)
    earlier.wait()
    after = values(model)
    checkpoint.load(folder, model, optimizer)
    return after, values(model)


def test_an_older_state_does_not_replace_a_newer_one(tmp_path: Path, gate: Gate):
    results, _ = run_world(2, saving_again, str(tmp_path), gate)
    assert_same_bits(*results[0])


def test_ranks_load_one_checkpoint_although_another_job_commits_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pair = job()
    for step in 1, 2:
        checkpoint.save(tmp_path, *pair, step=step)
    newer, hidden = tmp_path / "step-000000002", tmp_path / "hidden"
    newer.rename(hidden)
    calls, choose = [], folders.choose

    def committed_between(*args: Any, **options: Any) -> Path | None:
        calls.append(args)
        if len(calls) == 2:  # on the second rank, after the first one has chosen
            hidden.rename(newer)
        return choose(*args, **options)

    monkeypatch.setattr(folders, "choose", committed_between)
    steps, _ = run_world(2, lambda group: checkpoint.load(tmp_path, *job(group)).step)
    assert steps == [1, 1] and newer.exists()


def test_ranks_wait_for_a_save_alike_although_one_has_collected_the_optimizer(tmp_path: Path):
    def run(group: Any) -> Path:
        model, optimizer = job(group)
        save = save_async(tmp_path, model, optimizer, step=1)
        late = [optimizer] if group.rank() == 1 else []  # as if not yet garbage-collected
        del model, optimizer
        gc.collect()
        path = save.wait()
        late.clear()
        return path

    assert all(path.exists() for path in ThreadedWorld(2, timeout=20).run(run))


@pytest.mark.parametrize("waits", [True, False])
def test_a_save_that_is_over_keeps_neither_model_nor_optimizer_in_memory(
    tmp_path: Path, waits: bool
):
    model, optimizer = job()
    save = save_async(tmp_path, model, optimizer, step=1)
    if waits:
        save.wait()
    else:
        save._thread.join()
        del save
    left = weakref.ref(model), weakref.ref(optimizer), weakref.ref(packed_of(optimizer))
    del model, optimizer
    gc.collect()
    assert [it() for it in left] == [None, None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_told_once_and_costs_one_checkpoint(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture, rank: int
):
    gate.fails = f"__{rank}_0"
    gate.open.set()

    def three_saves(group: Any) -> None:
        model, optimizer = job(group)
        lost = save_async(tmp_path, model, optimizer, step=1)
        group.barrier().wait()  # all ranks have started, which end() relies on
        end(lost, "test")
        gate.fails = ""
        second = save_async(tmp_path, model, optimizer, step=2)
        save_async(tmp_path, model, optimizer, step=3).wait()
        assert second.wait().exists(), "the save after a failure is kept"
        # wait() raises the same error on all ranks, with the name of the file.
        with pytest.raises(RuntimeError, match=rf"step-000000001' is lost.*No space.*__{rank}_0"):
            lost.wait()

    with caplog.at_level(logging.ERROR):
        run_world(2, three_saves)
    assert [r.levelname for r in caplog.records] == ["ERROR"] and "is lost" in caplog.text
    assert list(checkpoints(tmp_path)) == [3, 2]
    assert not list(tmp_path.glob(BACKGROUND + "*"))


def test_a_rank_without_room_to_say_why_it_failed_ends_the_save_at_once(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    gate.fails = "__1_0"
    gate.open.set()
    draft = saving.RankSave._draft

    def full(job: Any, data: bytes) -> None:
        if len(data) < saving.SAID:  # more than the reserved space
            draft(job, data[:9])
            no_space()
        draft(job, data)

    monkeypatch.setattr(saving.RankSave, "_draft", full)

    def lost(group: Any) -> None:
        model, optimizer = job(group)
        with pytest.raises(
            RuntimeError, match=r"is lost.* rank 1: .* is the disk full\?"
        ) as caught:
            save_async(tmp_path, model, optimizer, step=1, timeout=30.0).wait()
        assert group.rank() == 0 or "No space" in str(caught.value.__cause__)

    run_world(2, lost)
    assert not list(tmp_path.iterdir())


def test_who_waits_for_a_save_that_fails_is_not_told_by_the_log_as_well(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
):
    gate.fails = "__0_0"
    model, optimizer = job()
    save = save_async(tmp_path, model, optimizer, step=1)
    timer = threading.Timer(0.2, gate.open.set)
    timer.start()
    with pytest.raises(RuntimeError, match="No space"):
        save.wait()
    timer.join()
    assert not caplog.records


def test_a_save_beside_a_save_async_is_named_on_all_ranks(tmp_path: Path):
    def attempt(group: Any) -> None:
        model, optimizer = job(group)
        for _ in range(2):  # first without a save in progress, then with one
            with pytest.raises(RuntimeError, match=r"rank 0: save_async; rank 1: save; make"):
                verb = checkpoint.save if group.rank() == 1 else save_async
                verb(tmp_path, model, optimizer, step=1)
            save_async(tmp_path, model, optimizer, step=2 + _).wait()

    run_world(2, attempt)
    assert list(checkpoints(tmp_path)) == [3, 2]


@on_each_rank(2)
def test_a_wait_beside_another_call_is_named_on_all_ranks(group: Any, tmp_path: Path):
    model, optimizer = job(group)
    save = save_async(tmp_path, model, optimizer, step=1)
    with pytest.raises(RuntimeError, match="rank 0: wait of save_async; rank 1: full_state"):
        save.wait() if group.rank() == 0 else optimizer.full_state_dict()
    optimizer.close()
    assert save.wait().exists(), "although the optimizer is closed"


def test_rank_0_gives_up_on_a_rank_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave = saving.RankSave.leave
    monkeypatch.setattr(
        saving.RankSave, "leave", lambda job, message: job.rank or leave(job, message)
    )

    def lost(group: Any) -> None:
        model, optimizer = job(group)
        with pytest.raises(RuntimeError, match=r"rank 1 wrote nothing within 3\.0 seconds"):
            save_async(tmp_path, model, optimizer, step=1, timeout=3.0).wait()

    run_world(2, lost)
    assert checkpoint.latest(tmp_path) is None


def begin_and_end(folder: Path) -> None:
    ends = threading.Event()

    def slow(point: str, path: str) -> None:
        if point == "create" and path.endswith(".distcp"):
            ends.wait()
            time.sleep(0.5)

    watch(pytest.MonkeyPatch(), slow)
    assert not save_async(folder, *job(), step=1).done()
    ends.set()


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path):
    """At the end, a forked process also waits for the interpreter's threads."""
    process = multiprocessing.get_context("fork").Process(target=begin_and_end, args=(tmp_path,))
    process.start()
    process.join(patience(100))
    assert process.exitcode == 0
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"


def begin_and_say_so(folder: Path, pipe: int) -> None:
    def blocked(point: str, path: str) -> None:
        if point == "create" and path.endswith(".distcp"):
            os.write(pipe, b"writing")
            threading.Event().wait()

    watch(pytest.MonkeyPatch(), blocked)
    model, optimizer = job()
    save_async(folder, model, optimizer, step=1).wait()


def test_a_process_that_is_killed_leaves_nothing_that_is_taken(tmp_path: Path):
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            begin_and_say_so(tmp_path, say)
        finally:
            os._exit(1)
    os.close(say)
    told = os.read(said, 7)
    os.close(said)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert told == b"writing"
    assert checkpoint.latest(tmp_path) is None
    assert list(tmp_path.glob(BACKGROUND + "*")), "the control: a save was in progress"
    model, optimizer = job()
    save_async(tmp_path, model, optimizer, step=1).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001"]
