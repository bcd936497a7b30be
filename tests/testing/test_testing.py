"""The single-process worlds of ``shardcast.testing``: fake and threaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardcast.testing import (
    BufferHazardError,
    CollectiveMismatchError,
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

# The names of torch 2.13, or those of 2.11, which later versions deprecate.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ramp(group: Group, size: int = 6) -> Tensor:
    """Return 0, 1, 2 … on rank 0, 10, 11, 12 … on rank 1, and so on."""
    return torch.arange(size, dtype=torch.float32) + 10 * group.rank()


def every_collective(group: Group, base: Tensor) -> dict[str, Tensor]:
    """Return the results of each collective whose result is specified on every rank."""
    rank, world = group.rank(), group.size()
    results: dict[str, Tensor] = {}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        results[op] = base.int() if op.startswith("B") else base.clone()
        dist.all_reduce(results[op], op=getattr(ReduceOp, op), group=group)
    results["broadcast"] = base.clone()
    dist.broadcast(results["broadcast"], group=group, group_src=1)
    chunks = [torch.empty(6) for _ in range(world)]
    dist.all_gather(chunks, base, group=group)
    results["all_gather"] = torch.cat(chunks)
    results["all_gather_single"] = torch.empty(world * 6)
    all_gather_single(results["all_gather_single"], base, group=group)
    results["reduce_scatter_single"] = torch.empty(6 // world)
    reduce_scatter_single(results["reduce_scatter_single"], base, group=group)
    splits = {2: [2, 4], 3: [1, 2, 3]}[world]
    results["all_to_all_single"] = torch.empty(splits[rank] * world)
    dist.all_to_all_single(
        results["all_to_all_single"], base, [splits[rank]] * world, splits, group=group
    )
    dist.barrier(group=group)
    return results


def rooted_collectives(group: Group) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the results of the collectives with a root."""
    rank = group.rank()
    reduced, part = ramp(group), torch.empty(2)
    dist.reduce(reduced, group=group, group_dst=2)
    dist.scatter(
        part, list(ramp(group).view(3, 2)) if rank == 1 else None, group=group, group_src=1
    )
    gathered = [torch.empty(6) for _ in range(3)] if rank == 0 else None
    dist.gather(ramp(group), gathered, group=group, group_dst=0)
    return reduced, part, gathered or []


# --- values -----------------------------------------------------------------------------------


def test_every_collective_gives_the_values_computed_by_hand() -> None:
    base = torch.arange(6.0)
    rows = torch.stack([base, base + 10, base + 20])
    bits = rows.int()
    expected = {
        "SUM": rows.sum(0),
        "AVG": rows.mean(0),
        "MAX": rows[2],
        "MIN": base,
        "PRODUCT": rows.prod(0),
        "BAND": bits[0] & bits[1] & bits[2],
        "BOR": bits[0] | bits[1] | bits[2],
        "BXOR": bits[0] ^ bits[1] ^ bits[2],
        "broadcast": rows[1],
        "all_gather": rows.flatten(),
        "all_gather_single": rows.flatten(),
    }
    results = threaded_world(3, lambda group: every_collective(group, ramp(group)))
    for rank, result in enumerate(results):
        for name, value in expected.items():
            assert result[name].equal(value), name
        assert result["reduce_scatter_single"].equal(rows.sum(0).view(3, 2)[rank])
        assert result["all_to_all_single"].equal(rows.split([1, 2, 3], 1)[rank].flatten())
    rooted = threaded_world(3, rooted_collectives)
    assert rooted[2][0].equal(rows.sum(0)) and torch.stack(rooted[0][2]).equal(rows)
    assert torch.cat([part for _, part, _ in rooted]).equal(rows[1])


@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_fake_world_gives_what_threads_give_when_all_ranks_do_the_same(
    world_size: int, rank: int
) -> None:
    world, base = ThreadedWorld(world_size), torch.arange(1.0, 7.0)
    expected = world.run(every_collective, base)[rank]
    with fake_world(world_size, rank) as group:
        for name, value in every_collective(group, base).items():
            assert value.equal(expected[name]), name
    assert group.log == world.logs[rank]


def test_a_sum_adds_in_rank_order_and_rounds_to_the_dtype_each_time() -> None:
    def total(group: Group, values: list[float]) -> float:
        x = torch.tensor([values[group.rank()]], dtype=torch.bfloat16)
        dist.all_reduce(x, group=group)
        return x.item()

    # bfloat16 has 256 and 258 but not 257, so the sum depends on the order.
    assert threaded_world(3, total, [256.0, 1.0, 1.0]) == [256.0] * 3
    assert threaded_world(3, total, [1.0, 1.0, 256.0]) == [258.0] * 3


def test_a_fake_rank_of_1024_costs_what_one_rank_costs_and_needs_no_memory() -> None:
    logs = []
    for rank in (0, 511, 1023):
        with fake_world(1024, rank) as group:
            gradients = torch.ones(1024 * 64, dtype=torch.bfloat16)
            span = torch.empty(64, dtype=torch.bfloat16)
            reduce_scatter_single(span, gradients, op=ReduceOp.AVG, group=group)
            dist.all_reduce(norm := span.float().square().sum(), group=group)
            assert norm.item() == 1024 * 64
            big = torch.empty(2**40, dtype=torch.bfloat16, device="meta")
            reduce_scatter_single(big[: 2**30], big, group=group)
        logs.append(group.log)
    assert_same_sequence(logs)
    assert [record.nbytes for record in logs[0]] == [2**17, 4, 2**41]


# --- every mismatch is an error on every rank --------------------------------------------------

X = torch.ones(4)
Call = Callable[[Group], Any]


def reduced(x: Tensor = X, op: Any = ReduceOp.SUM) -> Call:
    return lambda group: dist.all_reduce(x.clone(), op=op, group=group)


def broadcast(x: Tensor = X, source: int = 0) -> Call:
    return lambda group: dist.broadcast(x.clone(), group=group, group_src=source)


def gathered(size: int) -> Call:
    return lambda group: all_gather_single(torch.empty(3 * size), torch.ones(size), group=group)


def rooted(dest: int) -> Call:
    return lambda group: dist.reduce(X.clone(), group=group, group_dst=dest)


MISMATCHES: dict[str, tuple[Call, Call]] = {
    "op": (reduced(), broadcast()),
    "shape": (reduced(), reduced(torch.ones(2, 2))),
    "dtype": (broadcast(), broadcast(X.half())),
    "source": (broadcast(), broadcast(source=1)),
    "dest": (rooted(0), rooted(1)),
    "reduce_op": (reduced(), reduced(op=ReduceOp.AVG)),
    "op of a barrier": (lambda group: dist.barrier(group=group), reduced()),
    "shape of the gathered": (gathered(4), gathered(3)),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_raises_on_every_rank_with_what_every_rank_called(case: str) -> None:
    calls = MISMATCHES[case]
    world = ThreadedWorld(3)
    for call in calls:  # positive control: all ranks agree
        world.run(call)

    def run(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError) as info:
            calls[group.rank() % 2](group)
        with pytest.raises(CollectiveMismatchError):
            dist.barrier(group=group)  # later collectives raise, too
        return str(info.value)

    messages = world.run(run)
    for message in messages:
        assert message.startswith("collective 0 does not match: ranks ")
        assert f"differ in {case.split()[0]}:" in message
    complete = next(it for it in messages if "not there yet" not in it)
    for rank in range(3):
        assert f"rank {rank}: {world.logs[rank][0]}" in complete
    with pytest.raises(CollectiveMismatchError) as info:
        threaded_world(3, lambda group: calls[group.rank() % 2](group))
    assert sorted(info.value.calls) == [0, 1, 2]


def test_what_one_rank_sends_must_be_what_the_other_expects() -> None:
    def exchange(group: Group, rank_1_expects: int) -> Tensor:
        sends = [[3, 1], [2, 2]][group.rank()]
        expects = [[3, 2], [rank_1_expects, 2]][group.rank()]
        out = torch.empty(sum(expects))
        dist.all_to_all_single(out, ramp(group, 4), expects, sends, group=group)
        return out

    first, second = threaded_world(2, exchange, 1)
    assert first.tolist() == [0, 1, 2, 10, 11] and second.tolist() == [3, 12, 13]
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 sends \[1\] to rank 1, .*\[2\]"):
        threaded_world(2, exchange, 2)
    with pytest.raises(ValueError, match="every peer sends"), fake_world(2, rank=0) as group:
        dist.all_to_all_single(torch.empty(5), torch.ones(5), [2, 3], [2, 3], group=group)


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
        ("one dtype", lambda group: group.allreduce_coalesced([X.clone(), X.half()])),
        ("do not cut", lambda g: dist.all_to_all_single(X.clone(), X, [3, 2], [3, 2], group=g)),
    ],
)
def test_a_call_that_is_wrong_by_itself_is_refused(why: str, call: Call) -> None:
    with pytest.raises(ValueError, match=why):
        threaded_world(2, call)
    with pytest.raises(ValueError, match=why), fake_world(2, rank=0) as group:
        call(group)


# --- ranks that leave --------------------------------------------------------------------------


def sums(group: Group, count: int) -> list[float]:
    """Call ``count`` collectives of different sizes."""
    out = []
    for i in range(count):
        x = torch.full((i + 1,), float(group.rank()))
        dist.all_reduce(x, group=group)
        out.append(float(x[0]))
    return out


@pytest.mark.parametrize("count", [0, 2])
def test_a_rank_that_returns_early_makes_the_others_raise(count: int) -> None:
    messages: dict[int, str] = {}

    def run(group: Group) -> None:
        try:
            sums(group, count if group.rank() == 1 else 3)
        except RankLeftError as error:
            assert error.rank == 1
            messages[group.rank()] = str(error)
            raise

    with pytest.raises(RankLeftError, match="rank 1 has left"):
        threaded_world(3, run)
    for rank in (0, 2):
        message = messages[rank]
        assert message.startswith(f"rank 1 has left after {count} collectives (it returned)")
        assert f"rank {rank}: #{count} all_reduce(float32[{count + 1}], reduce_op=SUM)" in message


def test_the_exception_that_came_first_is_raised_and_not_its_consequences() -> None:
    seen: dict[int, BaseException] = {}

    def run(group: Group) -> None:
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


@pytest.mark.parametrize("count", [1, 0])
def test_a_rank_that_never_comes_back_does_not_hang_the_run(count: int) -> None:
    world, release = ThreadedWorld(3, timeout=0.2), threading.Event()

    def run(group: Group) -> None:
        if group.rank() == 1:
            release.wait(20)
        sums(group, count)

    place = "collective 0" if count else "any collective"
    with pytest.raises(RendezvousTimeoutError, match=f"rank 1 has not arrived at {place}") as info:
        world.run(run)
    assert info.value.missing == (1,)
    if count:
        assert "rank 1 has not finished" in info.value.__notes__
    with pytest.raises(RuntimeError, match="have not finished"):
        world.run(sums, 1)
    release.set()


# --- asynchronous collectives ------------------------------------------------------------------


def launch(tensor: Tensor, group: Group) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


def test_launching_never_blocks_and_waits_may_come_in_any_order() -> None:
    def run(group: Group) -> list[float]:
        tensors = [torch.full((i + 1,), float(group.rank() + i)) for i in range(4)]
        if group.rank() == 0:
            for work in reversed([launch(tensor, group) for tensor in tensors]):
                while not work.is_completed():  # polling lets the other ranks run
                    pass
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
        poisoned = bool(x.isnan().all())
        work.wait()
        return poisoned, x.equal(torch.full((4,), 2, dtype=dtype))

    assert threaded_world(2, run) == [(True, True)] * 2


@pytest.mark.parametrize("side", ["input", "output", "neighbour"])
def test_writing_to_a_buffer_in_flight_is_found_at_wait_and_beside_it_is_allowed(side: str) -> None:
    def run(group: Group) -> Tensor:
        pack, gathered = torch.ones(6), torch.zeros(8)
        work = dist.all_gather([gathered[:4], gathered[4:]], pack[:4], group=group, async_op=True)
        written, at = {"input": (pack, 0), "output": (gathered, 5), "neighbour": (pack, 4)}[side]
        written[at] = 2.0
        work.wait()
        return gathered

    if side == "neighbour":
        assert all(gathered.equal(torch.ones(8)) for gathered in threaded_world(2, run))
    else:
        with pytest.raises(BufferHazardError, match=f"an {side} of #0 all_gather"):
            threaded_world(2, run)


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


# --- turns and state after a run ---------------------------------------------------------------


def test_each_rank_has_a_random_generator_of_its_own() -> None:
    def draw(group: Group, seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        first = torch.rand(3)
        dist.barrier(group=group)
        return torch.cat([first, torch.rand(3)])

    state = torch.get_rng_state()
    alike, unlike = threaded_world(3, draw, 7), threaded_world(3, draw, None)
    assert torch.get_rng_state().equal(state), "the caller's generator is unchanged"
    for rank in range(3):
        for seed, drawn in ((7, alike[rank]), (rank, unlike[rank])):
            torch.manual_seed(seed)
            assert drawn.equal(torch.rand(6)), "by default, ranks differ and runs do not"


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
    assert all(order() == first for _ in range(3))


def test_groups_stay_from_run_to_run_and_logs_start_afresh() -> None:
    world = ThreadedWorld(2)
    groups = list(world.groups)
    for count in (3, 1):
        world.run(sums, count)
        assert [len(log) for log in world.logs] == [count] * 2
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
