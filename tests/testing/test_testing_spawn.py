"""The world of processes in ``shardcast.testing``. Functions that run in it must be at the top
level of a module."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardcast.testing import (
    ProcessFailedError,
    SpawnedWorld,
    spawn,
    spawn_world,
    threaded_world,
)

Group = dist.ProcessGroup


@pytest.fixture
def forked() -> Iterator[SpawnedWorld]:
    """Yield a world whose processes a test may end."""
    with spawn_world(2, start_method="forkserver") as world:
        yield world
        processes = world.run(process_id)
    assert_gone(processes)


def assert_gone(processes: list[int]) -> None:
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def process_id(group: Group) -> int:
    return os.getpid()


def double_sum(group: Group, tensor: Tensor) -> Tensor:
    tensor *= group.rank() + 1
    dist.all_reduce(tensor, group=group)
    return tensor


def collectives(group: Group) -> list[Tensor]:
    base, out = torch.arange(6.0) + 10 * group.rank(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        out.append(base.clone())
        dist.all_reduce(out[-1], op=op, group=group)
    splits = [2, 4]
    out.append(torch.empty(2 * splits[group.rank()]))
    dist.all_to_all_single(out[-1], base, [splits[group.rank()]] * 2, splits, group=group)
    dist.all_reduce(base, group=group, async_op=True).wait()
    return [*out, base]


def facts(group: Group) -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "env": [os.environ[name] for name in names],
        "group": (group.rank(), group.size(), dist.get_backend(group)),
        "default": (dist.get_rank(), dist.get_world_size()),
        "threads": torch.get_num_threads(),
        "draw": draw(group),
    }


def tamper(group: Group) -> None:
    os.environ["RANK"] = "7"
    del os.environ["LOCAL_WORLD_SIZE"]


def draw(group: Group) -> float:
    return torch.rand(1).item()


def fail_alone(group: Group) -> None:
    if group.rank() == 1:
        raise KeyError("only rank 1")
    dist.barrier(group=group)


def fail_together(group: Group) -> None:
    raise AssertionError(f"both, here rank {group.rank()}")


def fail_unpicklably(group: Group) -> None:
    raise UnpicklableError("cannot", "travel")


def return_a_lambda(group: Group) -> Callable[[], None]:
    return lambda: None


def die(group: Group) -> None:
    if group.rank() == 1:
        os._exit(3)
    dist.barrier(group=group)


def sleep_too_long(group: Group, folder: Path) -> None:
    assert list(folder.iterdir()), "negative control: a run has files"
    if group.rank() == 1:
        time.sleep(60)


def leave_a_mess(group: Group) -> None:
    """Rank 0 launches a broadcast that rank 1 does not join, and destroys the group."""
    dist.barrier(group)  # else a rank may disconnect one that is still connecting
    if group.rank() == 0:
        dist.broadcast(torch.ones(1), group=group, group_src=0, async_op=True)
    dist.destroy_process_group()


def test_processes_and_threads_give_the_same_values_and_arguments_are_copies(
    gloo: SpawnedWorld,
) -> None:
    tensor = torch.ones(3)
    assert all(it.equal(torch.full((3,), 3.0)) for it in gloo.run(double_sum, tensor))
    assert tensor.equal(torch.ones(3))
    for real, threaded in zip(gloo.run(collectives), threaded_world(2, collectives), strict=True):
        assert all(a.equal(b) for a, b in zip(real, threaded, strict=True))


def test_the_same_processes_serve_run_after_run_with_fresh_groups(forked: SpawnedWorld) -> None:
    processes = forked.run(process_id)
    assert len({*processes, os.getpid()}) == 3
    forked.run(leave_a_mess)
    forked.run(collectives)
    assert forked.run(process_id) == processes


def test_each_run_finds_what_a_launcher_would_set_and_a_seed_of_its_own(
    gloo: SpawnedWorld,
) -> None:
    first, second = gloo.run(facts)
    assert first["env"] == ["0", "0", "2", "2"]
    assert second["env"] == ["1", "1", "2", "2"]
    assert second["group"] == (1, 2, "gloo")
    assert second["default"] == (1, 2)
    assert first["threads"] == 1
    gloo.run(tamper)
    again, _ = gloo.run(facts)
    assert again["env"] == first["env"]
    assert first["draw"] == again["draw"] != second["draw"]
    assert [first["draw"], second["draw"]] == threaded_world(2, draw)


def test_an_exception_on_all_ranks_is_raised_here_with_its_traceback_or_named(
    gloo: SpawnedWorld,
) -> None:
    processes = gloo.run(process_id)
    with pytest.raises(AssertionError, match="both, here rank") as info:
        gloo.run(fail_together)
    (note,) = info.value.__notes__
    assert note.startswith("raised by rank ") and "in fail_together\n" in note
    for fn, error, message in (
        (fail_unpicklably, ProcessFailedError, "UnpicklableError: cannot"),
        (return_a_lambda, Exception, "pickle"),
        (lambda group: None, TypeError, "top level of a module"),
    ):
        with pytest.raises(error, match=message):
            gloo.run(fn)
    assert gloo.run(process_id) == processes, "no process hangs: they are reused"


def test_a_failure_that_leaves_others_waiting_or_a_death_does_not_poison_the_next_run(
    forked: SpawnedWorld,
) -> None:
    processes = forked.run(process_id)
    with pytest.raises(KeyError, match="only rank 1") as info:
        forked.run(fail_alone)
    assert "in fail_alone\n" in info.value.__notes__[0]
    assert info.value.__notes__[1] == "rank 0 had not finished"
    assert_gone(processes)
    processes = {*processes, *forked.run(process_id)}
    assert len(processes) == 4
    with pytest.raises(ProcessFailedError, match=r"rank 1 of 2: .*exit code 3; .*__main__"):
        forked.run(die)
    assert_gone([*processes])


def test_a_time_out_names_who_had_not_finished_and_where_it_was(
    forked: SpawnedWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = forked.run(process_id)  # the first run makes a directory of the fork server
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TimeoutError, match=r"^rank 1 has not finished within 0\.5 s") as info:
        forked.run(sleep_too_long, tmp_path, timeout=0.5)
    assert "in sleep_too_long" in info.value.__notes__[0]
    assert_gone(processes)
    assert not list(tmp_path.iterdir()), "no file is left"


def test_spawn_runs_one_function_in_new_processes() -> None:
    processes = spawn(process_id, 1)
    assert_gone(processes)
    assert os.getpid() not in processes
