"""The worlds of ``shardcast.testing`` inside one process: fake and threaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardcast.testing import (
    BufferHazardError,
    CollectiveMismatchError,
    Death,
    Delay,
    Drop,
    RankDied,
    RankLeftError,
    RendezvousTimeoutError,
    ThreadedWorld,
    assert_same_sequence,
    fake_world,
    threaded_world,
)

pytestmark = pytest.mark.timeout(30)

Group = dist.ProcessGroup
ReduceOp = dist.ReduceOp

# The names of torch 2.13, or else those of 2.11, which later versions deprecate.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ramp(group: Group, size: int = 6) -> Tensor:
    """0, 1, 2 … on rank 0, 10, 11, 12 … on rank 1, and so on."""
    return torch.arange(size, dtype=torch.float32) + 10 * group.rank()


def every_collective(group: Group) -> dict[str, Tensor]:
    """One of each, in a world of 3, on tensors that tell rank and position."""
    rank, world = group.rank(), group.size()
    results: dict[str, Tensor] = {}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        results[op] = ramp(group)
        dist.all_reduce(results[op], op=getattr(ReduceOp, op), group=group)
    results["broadcast"] = ramp(group)
    dist.broadcast(results["broadcast"], group=group, group_src=1)
    results["reduce"] = ramp(group)
    dist.reduce(results["reduce"], group=group, group_dst=2)
    if rank != 2:  # elsewhere than on the destination the values are unspecified
        del results["reduce"]
    chunks = [torch.empty(6) for _ in range(world)]
    dist.all_gather(chunks, ramp(group), group=group)
    results["all_gather"] = torch.stack(chunks)
    results["all_gather_single"] = torch.empty(world * 6)
    all_gather_single(results["all_gather_single"], ramp(group), group=group)
    results["reduce_scatter_single"] = torch.empty(2)
    reduce_scatter_single(results["reduce_scatter_single"], ramp(group), group=group)
    results["all_to_all_single"] = torch.empty(6)
    dist.all_to_all_single(results["all_to_all_single"], ramp(group), group=group)
    splits = [1, 2, 3]
    results["uneven"] = torch.empty(splits[rank] * world)
    dist.all_to_all_single(
        results["uneven"], ramp(group), [splits[rank]] * world, splits, group=group
    )
    gathered = [torch.empty(6) for _ in range(world)] if rank == 0 else None
    dist.gather(ramp(group), gathered, group=group, group_dst=0)
    if gathered:
        results["gather"] = torch.stack(gathered)
    results["scatter"] = torch.empty(2)
    parts = list(ramp(group).view(3, 2)) if rank == 1 else None
    dist.scatter(results["scatter"], parts, group=group, group_src=1)
    dist.barrier(group=group)
    return results


def on_every_rank(
    fn: Callable[[Group], Any], error: type[Exception], world_size: int = 2, **options: Any
) -> list[str]:
    """Run ``fn``, expect ``error`` on *each* rank, and return the messages."""

    def caught(group: Group) -> str:
        with pytest.raises(error) as info:
            fn(group)
        return str(info.value)

    return threaded_world(world_size, caught, **options)


# --- a threaded world has the real values -----------------------------------------------------


def test_every_collective_gives_the_values_computed_by_hand() -> None:
    results = threaded_world(3, every_collective)
    base = torch.arange(6.0)
    for rank, result in enumerate(results):
        assert result["SUM"].equal(3 * base + 30)
        assert result["AVG"].equal(base + 10)
        assert result["MAX"].equal(base + 20)
        assert result["MIN"].equal(base)
        assert result["PRODUCT"].equal(base * (base + 10) * (base + 20))
        assert result["broadcast"].equal(base + 10)
        assert result["all_gather"].equal(torch.stack([base, base + 10, base + 20]))
        assert result["all_gather_single"].equal(torch.cat([base, base + 10, base + 20]))
        assert result["reduce_scatter_single"].equal((3 * base + 30)[2 * rank : 2 * rank + 2])
        mine = base[2 * rank : 2 * rank + 2]
        assert result["all_to_all_single"].equal(torch.cat([mine, mine + 10, mine + 20]))
        mine = torch.split(base, [1, 2, 3])[rank]
        assert result["uneven"].equal(torch.cat([mine, mine + 10, mine + 20]))
        assert result["scatter"].equal(10 + base[2 * rank : 2 * rank + 2])
    assert results[2]["reduce"].equal(3 * base + 30)
    assert results[0]["gather"].equal(torch.stack([base, base + 10, base + 20]))


def test_a_sum_adds_in_rank_order_and_rounds_to_the_dtype_each_time() -> None:
    def total(group: Group, values: list[float]) -> float:
        x = torch.tensor([values[group.rank()]], dtype=torch.bfloat16)
        dist.all_reduce(x, group=group)
        return x.item()

    # Next to 256, bfloat16 knows 258 but not 257: the sum depends on the order.
    assert threaded_world(3, total, [256.0, 1.0, 1.0]) == [256.0] * 3
    assert threaded_world(3, total, [1.0, 1.0, 256.0]) == [258.0] * 3


def test_bitwise_reductions_work_on_integers() -> None:
    def bits(group: Group) -> list[int]:
        out = []
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            x = torch.tensor([(0b1100, 0b1010)[group.rank()]])
            dist.all_reduce(x, op=op, group=group)
            out.append(int(x))
        return out

    assert threaded_world(2, bits) == [[0b1000, 0b1110, 0b0110]] * 2


def test_object_collectives_work() -> None:
    def objects(group: Group) -> tuple[list[Any], list[Any]]:
        everybody: list[Any] = [None] * group.size()
        dist.all_gather_object(everybody, {"rank": group.rank()}, group=group)
        one = [f"from {group.rank()}"]
        dist.broadcast_object_list(one, group=group, group_src=1)
        return everybody, one

    assert threaded_world(2, objects) == [([{"rank": 0}, {"rank": 1}], ["from 1"])] * 2


def test_a_collective_works_inside_a_backward_hook() -> None:
    def gradient(group: Group) -> Tensor:
        weight = torch.nn.Parameter(torch.ones(3))

        def average(parameter: Tensor) -> None:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=ReduceOp.AVG, group=group)

        weight.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
        torch.autograd.backward((weight * (group.rank() + 1)).sum())
        assert weight.grad is not None
        return weight.grad

    assert all(grad.equal(torch.full((3,), 1.5)) for grad in threaded_world(2, gradient))


def test_a_broadcast_into_a_parameter_is_invisible_to_autograd_as_in_real_groups() -> None:
    def versions(group: Group) -> int:
        weight = torch.nn.Parameter(torch.full((3,), float(group.rank())))
        before = weight._version
        dist.broadcast(weight, group=group, group_src=1)
        assert weight.equal(torch.ones(3))
        return weight._version - before

    assert threaded_world(2, versions) == [0, 0]


def test_the_methods_have_the_names_of_older_torch_versions_too() -> None:
    def old_names(group: Any) -> list[str]:
        x, big = torch.ones(2), torch.ones(4)
        group._allgather_base(big, x).wait()
        group._reduce_scatter_base(x, big).wait()
        group.alltoall_base(x, x.clone(), [], []).wait()
        return [record.op for record in group.log]

    expected = ["all_gather_single", "reduce_scatter_single", "all_to_all_single"]
    assert threaded_world(2, old_names) == [expected] * 2


def test_a_group_knows_its_rank_size_and_name() -> None:
    def facts(group: Group) -> tuple[int, int, int, str]:
        return group.rank(), group.size(), dist.get_world_size(group), group.name()

    assert threaded_world(2, facts) == [(0, 2, 2, "strict"), (1, 2, 2, "strict")]
    with fake_world(8, rank=5) as group:
        assert facts(group) == (5, 8, 8, "fake")


# --- every mismatch is an error on every rank --------------------------------------------------

X = torch.ones(4)
Calls = tuple[Callable[[Group], Any], Callable[[Group], Any]]
MISMATCHES: dict[str, Calls] = {
    "op": (
        lambda group: dist.all_reduce(X.clone(), group=group),
        lambda group: dist.broadcast(X.clone(), group=group, group_src=0),
    ),
    "shape": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(2, 2), group=group),
    ),
    "dtype": (
        lambda group: dist.broadcast(X.clone(), group=group, group_src=0),
        lambda group: dist.broadcast(X.half(), group=group, group_src=0),
    ),
    "source": (
        lambda group: dist.broadcast(X.clone(), group=group, group_src=0),
        lambda group: dist.broadcast(X.clone(), group=group, group_src=1),
    ),
    "dest": (
        lambda group: dist.reduce(X.clone(), group=group, group_dst=0),
        lambda group: dist.reduce(X.clone(), group=group, group_dst=1),
    ),
    "reduce_op": (
        lambda group: dist.all_reduce(X.clone(), op=ReduceOp.SUM, group=group),
        lambda group: dist.all_reduce(X.clone(), op=ReduceOp.AVG, group=group),
    ),
    "op of a barrier": (
        lambda group: dist.barrier(group=group),
        lambda group: dist.all_reduce(X.clone(), group=group),
    ),
    "shape of the gathered": (
        lambda group: all_gather_single(torch.empty(12), torch.ones(4), group=group),
        lambda group: all_gather_single(torch.empty(9), torch.ones(3), group=group),
    ),
}


def calls_another_op(group: Group) -> None:
    MISMATCHES["op"][group.rank() % 2](group)


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_raises_on_every_rank_and_the_message_shows_all_calls(case: str) -> None:
    first, second = MISMATCHES[case]
    calls = (first, second, first)
    world = ThreadedWorld(3)

    def run(group: Group) -> str:
        dist.barrier(group=group)
        with pytest.raises(CollectiveMismatchError) as info:
            calls[group.rank()](group)
        return str(info.value)

    messages = world.run(run)
    complete = max(messages, key=len)
    for message in messages:
        assert message.startswith("collective 1 does not match: ranks ")
        assert f"differ in {case.split()[0]}:" in message
    for rank in range(3):
        assert f"rank {rank}: {world.logs[rank][1]}" in complete


@pytest.mark.parametrize("case", MISMATCHES)
def test_the_same_calls_pass_when_all_ranks_agree(case: str) -> None:
    for call in MISMATCHES[case]:
        threaded_world(3, call)


def test_a_mismatch_is_raised_by_run_with_what_every_rank_called() -> None:
    def run(group: Group) -> None:
        calls_another_op(group)

    with pytest.raises(CollectiveMismatchError) as info:
        threaded_world(4, run)
    ops = {rank: record.op for rank, record in info.value.calls.items()}
    assert ops == {0: "all_reduce", 1: "broadcast", 2: "all_reduce", 3: "broadcast"}


def test_a_mismatch_comes_at_once_even_if_a_rank_is_still_on_its_way() -> None:
    def run(group: Group) -> None:
        calls_another_op(group)

    start = time.monotonic()
    messages = on_every_rank(run, CollectiveMismatchError, 3, faults=[Delay(2, 0, seconds=20)])
    assert time.monotonic() - start < 5
    assert "rank 2: not there yet" in messages[1]


def test_the_order_counts() -> None:
    def run(group: Group) -> None:
        x, y = torch.ones(2), torch.ones(3)
        for tensor in (x, y) if group.rank() == 0 else (y, x):
            dist.all_reduce(tensor, group=group)

    first, second = on_every_rank(run, CollectiveMismatchError)
    assert "#0 all_reduce(float32[2]" in first + second
    assert "#0 all_reduce(float32[3]" in first + second


def test_what_one_rank_sends_must_be_what_the_other_expects() -> None:
    def exchange(group: Group, rank_1_expects: int) -> Tensor:
        sends = [[3, 1], [2, 2]][group.rank()]
        expects = [[3, 2], [rank_1_expects, 2]][group.rank()]
        out = torch.empty(sum(expects))
        dist.all_to_all_single(out, ramp(group, 4), expects, sends, group=group)
        return out

    first, second = threaded_world(2, exchange, 1)
    assert first.tolist() == [0, 1, 2, 10, 11]
    assert second.tolist() == [3, 12, 13]
    for message in on_every_rank(lambda group: exchange(group, 2), CollectiveMismatchError):
        assert "rank 0 sends [1] to rank 1, which expects [2]" in message


def test_after_a_mismatch_every_later_collective_fails_too() -> None:
    def run(group: Group) -> None:
        with pytest.raises(CollectiveMismatchError):
            calls_another_op(group)
        with pytest.raises(CollectiveMismatchError):
            dist.barrier(group=group)

    threaded_world(2, run)


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("contiguous", lambda group: dist.all_reduce(torch.ones(2, 3).t(), group=group)),
        ("no average", lambda group: dist.all_reduce(torch.ones(2).int(), ReduceOp.AVG, group)),
        ("rank 2", lambda group: dist.broadcast(torch.ones(2), group=group, group_src=2)),
        ("different sizes", lambda g: all_gather_single(torch.ones(4), torch.ones(1), group=g)),
        ("dtypes", lambda g: all_gather_single(torch.ones(2), torch.ones(1).half(), group=g)),
        ("not divide", lambda g: reduce_scatter_single(torch.ones(2), torch.ones(5), group=g)),
        ("expected 2", lambda group: dist.all_gather([X.clone()], X, group=group)),
        ("to itself", lambda g: dist.all_to_all_single(X.clone(), X, [3, 1], [1, 3], group=g)),
        ("do not cut", lambda g: dist.all_to_all_single(X.clone(), X, [3, 2], [3, 2], group=g)),
    ],
)
def test_a_call_that_is_wrong_by_itself_is_refused(why: str, call: Callable[[Group], Any]) -> None:
    with pytest.raises(ValueError, match=why):
        threaded_world(2, call)
    with pytest.raises(ValueError, match=why), fake_world(2, rank=0) as group:
        call(group)


# --- ranks that leave, and injected faults -----------------------------------------------------


def sums(group: Group, count: int) -> list[float]:
    """``count`` collectives that differ from one another."""
    out = []
    for i in range(count):
        x = torch.full((i + 1,), float(group.rank()))
        dist.all_reduce(x, group=group)
        out.append(float(x[0]))
    return out


@pytest.mark.parametrize("count", [0, 2])
def test_a_rank_that_returns_early_makes_the_others_raise(count: int) -> None:
    def run(group: Group) -> str:
        if group.rank() == 1:
            sums(group, count)
            return ""
        with pytest.raises(RankLeftError) as info:
            sums(group, 3)
        assert info.value.rank == 1
        return str(info.value)

    messages = threaded_world(3, run)
    for rank, message in ((0, messages[0]), (2, messages[2])):
        assert message.startswith(f"rank 1 has left after {count} collectives (it returned)")
        assert f"rank {rank}: #{count} all_reduce(float32[{count + 1}], reduce_op=SUM)" in message
    with pytest.raises(RankLeftError, match="rank 1 has left"):
        threaded_world(3, lambda group: sums(group, count if group.rank() == 1 else 3))


def test_the_exception_that_came_first_is_raised_and_not_its_consequences() -> None:
    seen: dict[int, BaseException] = {}

    def run(group: Group) -> None:
        sums(group, 1)
        if group.rank() == 2:
            raise KeyError("the original")
        try:
            sums(group, 1)
        except RankLeftError as error:
            seen[group.rank()] = error
            raise

    with pytest.raises(KeyError, match="the original") as info:
        threaded_world(3, run)
    assert info.value.__notes__ == [
        "raised by rank 2 of a threaded world of 3",
        "rank 0 raised RankLeftError",
        "rank 1 raised RankLeftError",
    ]
    assert all(error.__cause__ is info.value for error in seen.values())
    assert "it raised KeyError: 'the original'" in str(seen[0])


def test_a_death_raises_on_the_dead_rank_and_the_others_notice() -> None:
    world = ThreadedWorld(2)
    with pytest.raises(RankDied, match="rank 1 died at its collective 1"):
        world.run(sums, 3, faults=[Death(rank=1, at=1)])
    assert [len(log) for log in world.logs] == [2, 1]
    assert world.run(sums, 3) == [[1.0, 1.0, 1.0]] * 2, "the next run starts afresh"


def test_a_dropped_collective_is_found_as_a_mismatch() -> None:
    for message in on_every_rank(
        lambda group: sums(group, 3), CollectiveMismatchError, faults=[Drop(rank=0, at=1)]
    ):
        assert message.startswith("collective 1 does not match: ranks 0, 1 differ in shape")


def test_a_dropped_last_collective_is_found_as_a_rank_that_left() -> None:
    with pytest.raises(RankLeftError, match="rank 0 has left after 3 collectives"):
        threaded_world(2, sums, 3, faults=[Drop(rank=0, at=2)])


def test_a_delay_changes_nothing_but_the_time() -> None:
    start = time.monotonic()
    assert threaded_world(2, sums, 3, faults=[Delay(1, 1, seconds=0.3)]) == [[1.0] * 3] * 2
    assert time.monotonic() - start >= 0.3


def test_a_rank_that_takes_too_long_makes_every_rank_raise_and_is_named() -> None:
    messages = on_every_rank(
        lambda group: sums(group, 2),
        RendezvousTimeoutError,
        3,
        timeout=0.2,
        faults=[Delay(rank=1, at=1, seconds=20)],
    )
    for message in messages:
        assert message.startswith("rank 1 has not arrived at collective 1 within 0.2 s")
        assert "rank 2: #1 all_reduce" in message


def test_a_rank_that_never_comes_back_does_not_hang_the_run() -> None:
    world, release = ThreadedWorld(3, timeout=0.2), threading.Event()

    def run(group: Group) -> None:
        if group.rank() == 1:
            release.wait(20)
        sums(group, 1)

    with pytest.raises(RendezvousTimeoutError, match="rank 1 has not arrived") as info:
        world.run(run)
    assert info.value.missing == (1,)
    assert "rank 1 has not finished" in info.value.__notes__
    with pytest.raises(RuntimeError, match="have not finished"):
        world.run(sums, 1)
    release.set()


def test_work_that_takes_longer_than_the_time_out_is_an_error_without_waiters_too() -> None:
    release = threading.Event()
    with pytest.raises(RendezvousTimeoutError, match="rank 0 has not arrived at any collective"):
        threaded_world(2, lambda group: release.wait(20), timeout=0.1)
    release.set()


def test_a_fault_that_is_never_reached_is_an_error() -> None:
    with pytest.raises(ValueError, match="never reached: Death"):
        threaded_world(2, sums, 3, faults=[Death(rank=0, at=3)])
    with pytest.raises(ValueError, match="never happens in a world of 2"):
        threaded_world(2, sums, 3, faults=[Death(rank=2, at=0)])


# --- asynchronous collectives ------------------------------------------------------------------


def launch(tensor: Tensor, group: Group) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


def test_launching_never_blocks_and_waits_may_come_in_any_order() -> None:
    def run(group: Group) -> list[float]:
        tensors = [torch.full((i + 1,), float(group.rank() + i)) for i in range(4)]
        if group.rank() == 0:
            for work in reversed([launch(tensor, group) for tensor in tensors]):
                work.wait()
        else:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        return [float(tensor[0]) for tensor in tensors]

    assert threaded_world(2, run) == [[1.0, 3.0, 5.0, 7.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outputs_hold_nan_until_somebody_waits(dtype: torch.dtype) -> None:
    def run(group: Group) -> tuple[bool, bool]:
        x = torch.ones(4, dtype=dtype)
        work = launch(x, group)
        before = bool(x.isnan().all())
        work.wait()
        return before, x.equal(torch.full((4,), 2, dtype=dtype))

    assert threaded_world(2, run) == [(True, True)] * 2
    assert threaded_world(2, run, poison=False) == [(False, True)] * 2


def test_reading_a_result_too_early_gives_wrong_numbers() -> None:
    def run(group: Group, early: bool) -> float:
        x = torch.ones(4)
        work = launch(x, group)
        if early:
            total = x.sum()
        work.wait()
        return float(total if early else x.sum())

    assert threaded_world(2, run, False) == [8.0, 8.0]
    assert all(total != total for total in threaded_world(2, run, True)), "NaN, from the poison"


def write_between(group: Group, what: str) -> Tensor:
    pack, gathered = torch.ones(6), torch.zeros(8)
    source = pack[:4]
    work = dist.all_gather([gathered[:4], gathered[4:]], source, group=group, async_op=True)
    if what == "input":
        source[0] = 2.0
    elif what == "output":
        gathered[5] = 2.0
    elif what == "neighbour":
        pack[4] = 2.0
    work.wait()
    return gathered


@pytest.mark.parametrize("what", ["input", "output"])
@pytest.mark.parametrize("poison", [True, False])
def test_writing_to_a_buffer_in_flight_is_found_at_wait(what: str, poison: bool) -> None:
    for message in on_every_rank(
        lambda group: write_between(group, what), BufferHazardError, poison=poison
    ):
        assert f"an {what} of #0 all_gather" in message


@pytest.mark.parametrize("what", ["neighbour", "nothing"])
def test_writing_beside_a_buffer_in_flight_is_allowed(what: str) -> None:
    results = threaded_world(2, write_between, what)
    assert all(gathered.equal(torch.ones(8)) for gathered in results)


def test_peers_receive_what_was_there_at_the_launch() -> None:
    def run(group: Group) -> float:
        x = torch.full((2,), float(group.rank()))
        work = dist.broadcast(x, group=group, group_src=1, async_op=True)
        if group.rank() == 1:
            x.fill_(7.0)
            with pytest.raises(BufferHazardError):
                work.wait()
        work.wait()
        return float(x[0])

    assert threaded_world(2, run) == [1.0, 7.0]


def test_never_waiting_is_an_error() -> None:
    with pytest.raises(BufferHazardError, match=r"rank 0 never waited for #0 all_reduce"):
        threaded_world(2, lambda group: launch(torch.ones(2), group))
    with (
        pytest.raises(BufferHazardError, match=r"rank 3 never waited for #0 all_reduce"),
        fake_world(8, rank=3) as group,
    ):
        launch(torch.ones(2), group)


def test_polling_lets_the_other_ranks_run() -> None:
    def run(group: Group) -> float:
        x = torch.ones(1)
        work = launch(x, group)
        while not work.is_completed():
            pass
        work.wait()
        return float(x)

    assert threaded_world(3, run) == [3.0] * 3


# --- turns, and what a run leaves behind -------------------------------------------------------


def test_each_rank_has_a_random_generator_of_its_own() -> None:
    def draw(group: Group, seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        first = torch.rand(3)
        dist.barrier(group=group)
        return torch.cat([first, torch.rand(3)])

    torch.manual_seed(5)
    before = torch.get_rng_state()
    alike, unlike = threaded_world(3, draw, 7), threaded_world(3, draw, None)
    assert torch.get_rng_state().equal(before), "the caller's generator stays as it was"
    torch.manual_seed(7)
    expected = torch.rand(6)
    assert all(drawn.equal(expected) for drawn in alike)
    for rank, drawn in enumerate(unlike):
        torch.manual_seed(rank)
        assert drawn.equal(torch.rand(6)), "without a seed, ranks differ and runs do not"


def test_the_ranks_take_turns_in_the_same_order_in_every_run() -> None:
    def order() -> list[tuple[int, int]]:
        trace: list[tuple[int, int]] = []

        def run(group: Group) -> None:
            for i in range(50):
                trace.append((group.rank(), i))
                dist.barrier(group=group)

        threaded_world(4, run)
        return trace

    first = order()
    assert all(order() == first for _ in range(10))


def test_a_run_leaves_threads_and_settings_as_they_were() -> None:
    threads, torch_threads = threading.active_count(), torch.get_num_threads()
    threaded_world(4, sums, 2)
    with pytest.raises(RankDied):
        threaded_world(4, sums, 2, faults=[Death(0, 0)])
    assert threading.active_count() == threads
    assert torch.get_num_threads() == torch_threads
    assert not dist.is_initialized()


def test_groups_stay_from_run_to_run_and_logs_start_afresh() -> None:
    world = ThreadedWorld(2)
    groups = list(world.groups)
    world.run(sums, 3)
    assert [len(log) for log in world.logs] == [3, 3]
    world.run(sums, 1)
    assert [len(log) for log in world.logs] == [1, 1]
    assert world.groups == groups
    with pytest.raises(RuntimeError, match="only inside"):
        dist.barrier(group=world.groups[0])


# --- logs --------------------------------------------------------------------------------------


def test_a_log_tells_what_was_called() -> None:
    world = ThreadedWorld(2)

    def run(group: Group) -> None:
        dist.broadcast(torch.ones(3, 2), group=group, group_src=1)
        launch(torch.ones(4, dtype=torch.bfloat16), group).wait()
        all_gather_single(torch.empty(4), torch.ones(2), group=group)
        expects = [2, 2] if group.rank() == 1 else [3, 3]
        out = torch.empty(sum(expects))
        dist.all_to_all_single(out, torch.ones(5), expects, [3, 2], group=group)

    world.run(run)
    broadcast, all_reduce, gather, exchange = world.logs[1]
    assert (broadcast.seq, broadcast.op, broadcast.shape) == (0, "broadcast", (3, 2))
    assert (broadcast.source, broadcast.reduce_op, broadcast.nbytes) == (1, None, 24)
    assert (all_reduce.dtype, all_reduce.reduce_op) == (torch.bfloat16, "SUM")
    assert (all_reduce.async_op, broadcast.async_op, all_reduce.nbytes) == (True, False, 8)
    assert (gather.op, gather.shape, gather.nbytes) == ("all_gather_single", (2,), 16)
    assert (exchange.input_splits, exchange.output_splits) == ((3, 2), (2, 2))
    assert str(broadcast) == "#0 broadcast(float32[3, 2], source=1)"
    assert_same_sequence(world.logs)


def test_different_sequences_are_told_apart_with_what_each_rank_did() -> None:
    logs = []
    for rank in range(12):
        with fake_world(12, rank) as group:
            dist.barrier(group=group)
            dist.all_reduce(torch.ones(5 if rank == 7 else 4), group=group)
        logs.append(group.log)
    assert_same_sequence([log for rank, log in enumerate(logs) if rank != 7])
    with pytest.raises(AssertionError) as info:
        assert_same_sequence(logs)
    assert str(info.value).splitlines() == [
        "the ranks' collectives differ at position 1:",
        "  ranks 0, 1, 2 … 11 (11 ranks): #1 all_reduce(float32[4], reduce_op=SUM)",
        "  rank 7: #1 all_reduce(float32[5], reduce_op=SUM)",
        "  the last common one: #0 barrier()",
    ]
    with pytest.raises(AssertionError, match="rank 1: nothing: its log ends at 1"):
        assert_same_sequence([logs[0], logs[1][:1]])


# --- the fake world ----------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_fake_world_gives_what_threads_give_when_all_ranks_do_the_same(
    world_size: int, rank: int
) -> None:
    def run(group: Group) -> list[Tensor]:
        base, out = torch.arange(1.0, 7.0), []
        for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
            out.append(base.clone())
            dist.all_reduce(out[-1], op=getattr(ReduceOp, op), group=group)
        for op in ("BAND", "BOR", "BXOR"):
            out.append(base.int())
            dist.all_reduce(out[-1], op=getattr(ReduceOp, op), group=group)
        out.append(base.clone())
        dist.broadcast(out[-1], group=group, group_src=1)
        out.append(torch.empty(6 * world_size))
        all_gather_single(out[-1], base, group=group)
        chunks = [torch.empty(6) for _ in range(world_size)]
        dist.all_gather(chunks, base, group=group)
        out += chunks
        for reduce_op in (ReduceOp.SUM, ReduceOp.AVG):
            out.append(torch.empty(6 // world_size))
            reduce_scatter_single(out[-1], base, op=reduce_op, group=group)
        splits = {2: [2, 4], 3: [1, 2, 3]}[world_size]
        out.append(torch.empty(world_size * splits[group.rank()]))
        received = [splits[group.rank()]] * world_size
        dist.all_to_all_single(out[-1], base, received, splits, group=group)
        dist.barrier(group=group)
        return out

    world = ThreadedWorld(world_size)
    expected = world.run(run)[rank]
    with fake_world(world_size, rank) as group:
        for got, want in zip(run(group), expected, strict=True):
            assert got.equal(want)
    assert group.log == world.logs[rank]


def test_collectives_may_work_in_place() -> None:
    def run(group: Group) -> tuple[Tensor, Tensor]:
        pack = torch.arange(8.0)
        mine = pack[2 * group.rank() : 2 * group.rank() + 2]
        reduce_scatter_single(mine, pack, group=group)
        scattered = mine.clone()
        all_gather_single(pack, mine, group=group)
        return scattered, pack

    for scattered, pack in threaded_world(4, run):
        assert pack.equal(4 * torch.arange(8.0))
        assert scattered.numel() == 2
    with fake_world(4, rank=2) as group:
        scattered, pack = run(group)
    assert scattered.tolist() == [16.0, 20.0]
    assert pack.equal(torch.tensor([16.0, 20.0] * 4)), "all peers are taken to be alike"


def test_a_world_of_1024_costs_what_one_rank_costs() -> None:
    def step(group: Group) -> None:
        gradients = torch.ones(1024 * 64, dtype=torch.bfloat16)
        span = torch.empty(64, dtype=torch.bfloat16)
        reduce_scatter_single(span, gradients, op=ReduceOp.AVG, group=group)
        norm = span.float().square().sum()
        dist.all_reduce(norm, group=group)
        assert norm.item() == 1024 * 64
        all_gather_single(gradients, span, group=group)

    start = time.monotonic()
    logs = []
    for rank in (0, 511, 1023):
        with fake_world(1024, rank) as group:
            step(group)
        logs.append(group.log)
    assert_same_sequence(logs)
    assert time.monotonic() - start < 5


def test_a_fake_world_takes_meta_tensors() -> None:
    with fake_world(1024, rank=1) as group:
        big = torch.empty(2**40, dtype=torch.bfloat16, device="meta")
        reduce_scatter_single(big[: 2**30], big, group=group)
        dist.broadcast(big, group=group, group_src=3)
    assert [record.nbytes for record in group.log] == [2**41, 2**41]


def test_a_fake_world_refuses_splits_that_its_replicas_would_not_serve() -> None:
    with pytest.raises(ValueError, match="every peer sends"), fake_world(2, rank=0) as group:
        dist.all_to_all_single(torch.empty(5), torch.ones(5), [2, 3], [2, 3], group=group)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not in a world of 2"), fake_world(2, rank):
        pass
