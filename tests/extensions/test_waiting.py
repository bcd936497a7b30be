"""Errors and logs of ranks that wait for others, which make different calls."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, on_each_rank, sharded, train
from torch import nn

from shardcast import checkpoint
from shardcast.comm import Comm, ProcessGroups
from shardcast.comm.group import Work
from shardcast.comm.watch import Watch, _of_thread
from shardcast.extensions import waiting
from shardcast.extensions.waiting import look_after
from shardcast.messages import LOG
from shardcast.optimizer.sharded import packed_of
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.testing import FakeGroup, SpawnedWorld, ThreadedWorld
from shardcast.testing.strict import StrictGroup

pytestmark = pytest.mark.timeout(90)

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def limit(group: Any, seconds: float) -> None:
    """Give collectives a short time limit once all ranks are here."""
    dist.barrier(group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def one_more(group: Any) -> str | None:
    """Return rank 1's error of an additional batch after two steps; rank 0 just returns."""
    for of in (group, dist.new_group(timeout=timedelta(seconds=5))):  # the first has no short limit
        model = CASES["gpt"].build()
        optimizer = sharded(model, of, param_dtype=BF16, autocast=False, pack_params=6)
        dist.barrier(group)
        train(model, optimizer, range(2), "gpt")
    if group.rank() == 0:
        return None
    with pytest.raises(RuntimeError) as raised:
        CASES["gpt"].loss(model, CASES["gpt"].batch(2)).backward()
    return str(raised.value)


def test_a_rank_that_does_one_thing_more_is_told_what_it_waited_for(gloo: SpawnedWorld):
    _, told = gloo.run(one_more)
    waited = "in an all-to-all of pack 4 ('blocks.1.proj.weight' and 3 more), after 2 steps"
    assert told.startswith(f"rank 1 of 2 waited for the other ranks {waited}, and the process")
    assert "imed out" in told, "gloo's own words are kept"
    for cause in ("one more batch, two steps", "exited", "/troubleshooting.md"):
        assert cause in told


class GivesUp(FakeGroup):
    """Raises the error of a backend whose peers do not arrive."""

    error: type[Exception] = RuntimeError

    def _issue(self, call: Any) -> dist.Work:
        raise self.error("Timed out waiting 1800000ms")


PACK = PackLayout(
    4, "cpu", BF16, True, "", 8, (Slot("head.weight", (8,), 0, 8),), (Span(0, 0, 4), Span(1, 4, 8))
)
FULL, HALF = torch.zeros(8), torch.zeros(4)
CALLS: dict[str, Callable[[Comm], Any]] = {
    "a broadcast of pack 4 ('head.weight')": lambda c: c.broadcast(FULL, 0, PACK),
    "broadcasts of pack 4 ('head.weight')": lambda c: c.broadcast_all([(0, HALF)] * 2, PACK),
    "an all-gather of pack 4 ('head.weight')": lambda c: c.all_gather(FULL, HALF, PACK),
    "an all-to-all of pack 4 ('head.weight')": lambda c: c.all_to_all(FULL, FULL, about=PACK),
    "a reduce-scatter of pack 4 ('head.weight')": lambda c: c.reduce_scatter(HALF, FULL, PACK),
    "an all-reduce": lambda c: c.all_reduce(FULL),
    "an all-gather of save": lambda c: c.together(lambda: None, CPU, "save"),
    "an all-gather of descriptions": lambda c: c.all_gather(FULL, HALF, "descriptions"),
}


@pytest.mark.parametrize("named", CALLS)
def test_every_collective_names_itself_and_whose_it_is(named: str):
    group = GivesUp(1, 2)
    group.error = error = dist.DistBackendError
    comm = Comm(group)
    comm.steps = 12
    expected = f"rank 1 of 2 waited for the other ranks in {named}, after 12 steps"
    with pytest.raises(RuntimeError) as raised:
        CALLS[named](comm)
    assert str(raised.value).startswith(expected)
    assert isinstance(raised.value.__cause__, error)


@on_each_rank(1)
def test_a_rank_with_several_optimizers_tells_one_number_of_steps(group: Any, caplog: Any):
    """Log and error show the steps of the optimizer that made most."""
    comm, ahead = Comm(GivesUp(1, 2)), Comm(FakeGroup(1, 2))
    comm.steps, ahead.steps = 3, 5
    with caplog.at_level("WARNING", "shardcast"):
        comm.watch.waits = Work(comm, "an all-reduce", "")
        silence = waiting.Silence(comm.watch)
        silence.since -= 2 * waiting.PATIENCE
        silence.look()
    with pytest.raises(RuntimeError) as raised:
        comm.all_reduce(FULL)
    for text in (caplog.text, str(raised.value)):
        assert set(re.findall(r"after (\d+) steps", text)) == {"5"}


def test_errors_that_say_themselves_what_is_the_matter_are_left_as_they_are():
    group = GivesUp(1, 2)
    group.error = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError, match=r"^Timed out"):
        Comm(group).all_reduce(FULL)


def test_works_that_fail_later_are_named_too():
    class Lost(dist.Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            raise RuntimeError("Connection closed by peer")

    class Loses(FakeGroup):
        def _issue(self, call: Any) -> dist.Work:
            return Lost()

    work = Comm(Loses(0, 2)).all_to_all(FULL, FULL, about=PACK)
    with pytest.raises(RuntimeError, match=r"all-to-all of pack 4 .* Connection closed by peer"):
        work.wait()


@contextlib.contextmanager
def telling(patience: float) -> Iterator[list[str]]:
    """Yield the log messages of waits longer than ``patience``, in seconds."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "PATIENCE", patience)
        LOG.addHandler(handler := Handler())
        try:
            yield messages
        finally:
            LOG.removeHandler(handler)


def until(done: Callable[[], object]) -> None:
    """Wait until another rank or thread has done something."""
    while not done():  # limited by the test's timeout
        time.sleep(0.01)


def averaged(optimizer: Any) -> None:
    with optimizer.averaged("ema"):
        pass


COLLECTIVE: dict[str, Callable[[Any, nn.Module, str], object]] = {
    "save": lambda it, model, folder: checkpoint.save(folder, model, it, step=2),
    "averaged": lambda it, *_: averaged(it),
    "gather_gradients": lambda it, *_: it.gather_gradients(),
    "step": lambda it, *_: it.step(),
    "close": lambda it, *_: it.close(),
}


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardcast waiting"]


def comes_late(group: Any, call: str, folder: str) -> list[str]:
    """Return a rank's log if rank 1 is late for a call; wait until the watching thread ends."""
    with telling(0.6) as messages:
        model = CASES["mlp"].build()
        optimizer = sharded(model, param_dtype=BF16, averages={"ema": 0.9})
        told = Path(folder) / "told"

        def say_when_told() -> None:
            until(lambda: any("time.sleep" in text for text in messages))
            told.touch()

        speaker = threading.Thread(target=say_when_told)
        if group.rank() == 0:
            speaker.start()
        else:
            until(told.exists)  # outside any call of shardcast
        COLLECTIVE[call](optimizer, model, f"{folder}/saved")
        if group.rank() == 0:
            speaker.join()
        gc.collect()  # optimizers of earlier tests that were not closed
        optimizer.close(restore=False)
    until(lambda: not watching())  # on a busy machine, it may still be in a call of the store
    return messages


@pytest.mark.parametrize("call", COLLECTIVE)
def test_a_rank_that_waits_for_long_says_in_which_call_and_where_the_other_is(
    gloo: SpawnedWorld, tmp_path: Path, call: str
):
    first, _ = gloo.run(comes_late, call, str(tmp_path))
    message = next(text for text in first if "time.sleep" in text)  # the first, if ranks are idle
    assert message.startswith("WARNING rank 0 of 2 has waited ")
    own, other = message.split("rank 0: ")[1].split("rank 1: ")
    assert own.startswith(f"in {call} at test_waiting.py:")
    assert "waiting in " in own
    assert other.startswith("in no call of shardcast at test_waiting.py:")
    assert "`time.sleep(0.01)`" in other


def leaves_out_a_step(group: Any, size: int, goes_on: bool) -> str:
    """Return a rank's error if only rank 1 leaves out the second step."""
    with_limit: Any = dist.new_group([*range(size)])
    store = dist.distributed_c10d._get_default_store()
    if group.rank() >= size:
        return ""
    with telling(0.4):
        model = CASES["mlp"].build()
        optimizer = sharded(model, with_limit)
        try:
            for step in range(3):
                CASES["mlp"].loss(model, CASES["mlp"].batch(step)).backward()
                if step == 1:  # later collectives shall time out
                    limit(with_limit, 3.0)
                if step == 1 and group.rank() == 1:
                    if not goes_on:
                        until(lambda: store.check(["given up"]))  # as if it evaluated
                        return ""
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            store.set("given up", "")
            return str(error)
        finally:
            with contextlib.suppress(RuntimeError):
                optimizer.close(restore=False)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("size", "goes_on"), [(2, False), (4, True)])
def test_a_step_that_one_rank_leaves_out_is_named_with_what_that_rank_did_last(
    four: SpawnedWorld, size: int, goes_on: bool
):
    errors = four.run(leaves_out_a_step, size, goes_on)
    for rank, error in enumerate(errors[:size]):
        if rank == 1 and not goes_on:
            continue
        mine = "an all-to-all of pack" if rank == 1 else "an all-reduce of the control vector"
        assert error.startswith(f"rank {rank} of {size} waited for the other ranks in {mine}")
        known = error.split("Where they were seen last: ")[1]
        assert "in step at test_waiting.py:" in known
        last = "backward" if goes_on else "no call of shardcast"
        assert f"rank 1: in {last} at test_waiting.py:" in known
        assert goes_on or "`time.sleep(0.01)`" in known


def late_thread(group: Any, messages: list[str], known: bool) -> None:
    """Rank 1 makes a call after rank 0 has logged that it waits."""
    groups = ProcessGroups.flat(Comm(group))
    with look_after(groups) if known or group.rank() == 0 else contextlib.nullcontext():
        if group.rank() == 1:
            until(lambda: any("time.sleep" in text or not known for text in messages))
        groups.dp.together(lambda: None, CPU, "save")
    groups.end_watch()


@pytest.mark.parametrize("known", [True, False])
def test_ranks_that_are_threads_tell_of_each_other_and_of_what_is_not_known(known: bool):
    with telling(0.5) as messages:
        ThreadedWorld(2).run(late_thread, messages, known)
    where = "in no call of shardcast at test_waiting.py:" if known else "unknown"
    assert "rank 0: in together at test_waiting.py:" in messages[-1]
    assert f"rank 1: {where}" in messages[-1]


def test_the_last_optimizer_ends_the_thread_beside_one_whose_group_is_gone(
    monkeypatch: pytest.MonkeyPatch,
):
    """The group of another optimizer, which is not closed, was destroyed."""

    # an optimizer of an earlier test that is still alive would keep the shared thread
    monkeypatch.setattr(waiting, "_LOOKOUT", waiting.Lookout())

    def run(group: Any) -> list[threading.Thread]:
        before = threading.enumerate()
        last, gone = (ProcessGroups.flat(Comm(FakeGroup(0, 2))) for _ in range(2))
        with look_after(last), look_after(gone):
            assert [thread for thread in watching() if thread not in before]
        gone.dp._group = lambda: None
        last.end_watch()
        return [thread for thread in watching() if thread not in before]

    assert ThreadedWorld(1).run(run) == [[]]


def test_an_optimizer_that_the_thread_itself_collects_ends_its_watch_and_nobody_waits():
    """The thread may hold the last reference to a group while it checks it."""
    lookout = waiting.Lookout()
    watch = Watch()

    class Collected:
        size, store = 2, None

        @property
        def is_alive(self) -> bool:
            lookout.end(watch)  # like the finalizer of an optimizer
            return False

    watch._comms[group := Collected()] = None  # type: ignore[index]
    before = {*threading.enumerate()}
    lookout.begin(watch)
    (thread,) = {*threading.enumerate()} - before
    thread.join(10)
    assert not thread.is_alive()
    lookout.begin(watch)
    lookout.end(watch)
    del group


def test_groups_can_be_read_while_another_thread_makes_some(monkeypatch: pytest.MonkeyPatch):
    """The watching thread may read them at any time, and an error would end it."""
    monkeypatch.setattr(_of_thread, "watch", watch := Watch(), raising=False)
    stays, over = Comm(FakeGroup(0, 2)), threading.Event()
    interval = sys.getswitchinterval()

    def make() -> None:
        _of_thread.watch = watch
        while not over.is_set():
            made = [Comm(FakeGroup(0, 2)) for _ in range(5)]
            for comm in made:
                comm.watch.end(comm)

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        assert all(stays in watch.comms for _ in range(5000))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join(10)
    assert not thread.is_alive()


def test_a_run_in_which_no_rank_is_late_writes_to_no_store(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(StrictGroup, "store", property(lambda self: asked.append(self)))

    def steps(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group)
        train(model, optimizer, range(3))
        optimizer.full_state_dict()
        silence = waiting.Silence(packed_of(optimizer).comm.watch)
        for _ in range(2):  # as the thread does
            silence.look()
        optimizer.close()

    ThreadedWorld(2).run(steps)
    assert asked == []


def steps_of_two(group: Any) -> list[int]:
    """Return the steps before and after the group of the optimizer with the most is destroyed."""
    own: Any = dist.new_group()
    before, now = Comm(own), Comm(group)
    before.steps, now.steps = 1007, 1002
    steps = [now.watch.steps]
    dist.barrier(group)  # gloo on other ranks may still be connecting the new group
    dist.destroy_process_group(own)
    del own
    return [*steps, now.watch.steps, before.steps]


def test_steps_of_an_optimizer_whose_group_was_destroyed_count_no_more(gloo: SpawnedWorld):
    """A process that trains one model after another may still hold the first optimizer."""
    assert gloo.run(steps_of_two) == [[1007, 1002, 1007]] * 2
