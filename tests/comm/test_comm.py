"""Collectives of set-up and errors: exchange, joint failures, comparison of descriptions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import run_world

from shardcast.comm import Comm, warn_first, warn_once_for
from shardcast.testing import SpawnedWorld, ThreadedWorld, fake_world

CPU = torch.device("cpu")


def values_of(rank: int) -> Any:
    """Return a value whose type and length differ between ranks."""
    return [None, {"name": "x" * 1000, "range": (3, 5)}, [torch.arange(3).tolist()] * 7][rank % 3]


def moved(group: Any) -> list[Any]:
    comm, value = Comm(group), values_of(group.rank())
    return [comm.exchange(value, CPU), comm.gather(value, CPU), comm.share(value, CPU)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, "gloo"])
def test_values_are_exchanged_gathered_on_rank_0_and_shared_from_it(
    size: int | str, gloo: SpawnedWorld
):
    ranks = gloo.run(moved) if isinstance(size, str) else run_world(size, moved)[0]
    every = [values_of(rank) for rank in range(len(ranks))]
    assert ranks == [[every, [] if rank else every, every[0]] for rank in range(len(ranks))]


def test_large_values_are_exchanged_without_an_object_per_byte(monkeypatch: pytest.MonkeyPatch):
    value, listed, tolist = bytes(range(256)) * (1 << 14), [0], torch.Tensor.tolist

    def noting(tensor: torch.Tensor) -> Any:
        listed.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noting)
    ranks, _ = run_world(2, lambda group: Comm(group).exchange(value, CPU) == [value] * 2)
    assert ranks == [True, True]
    assert max(listed) <= 2, "only the lengths"


def test_a_process_alone_needs_no_group_and_no_collective():
    comm, tensor = Comm(None), torch.ones(3)
    comm.broadcast(tensor, 0)
    comm.all_reduce(tensor)
    comm.all_gather(torch.empty(3), tensor)
    assert tensor.tolist() == [1.0] * 3
    assert comm.exchange("own", CPU) == ["own"] == comm.collect(lambda: "own", CPU)
    with pytest.raises(KeyError):
        comm.together(lambda: {}["missing"], CPU)
    assert (comm.rank, comm.size, comm.backend(CPU)) == (0, 1, "none")


def backend_of(group: Any) -> str:
    return Comm(group).backend(CPU)


def test_the_backend_is_named_for_real_and_mock_groups(gloo: SpawnedWorld):
    assert gloo.run(backend_of) == ["gloo", "gloo"]
    with fake_world(2) as group:
        assert backend_of(group) == "fake"


SAME = ["total 3", "    a (2,)"]


def compared(group: Any, lines: dict[int, list[str]]) -> str:
    with pytest.raises(RuntimeError) as raised:
        Comm(group).check_equal(lines.get(group.rank(), SAME), CPU)
    return str(raised.value)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ({0: ["total 4", "    a (3,)"]}, "first difference: rank 0: a (3,); ranks 1, 2: a (2,)"),
        ({1: ["total 4", "    a (3,)"]}, "first difference: ranks 0, 2: a (2,); rank 1: a (3,)"),
        ({1: SAME[1:]}, "ranks 0, 2: total 3; rank 1: (nothing)"),
    ],
    ids=["of rank 0", "of rank 1", "a line less"],
)
def test_a_difference_is_named_alike_on_every_rank_the_most_indented_first(
    lines: dict[int, list[str]], shown: str
):
    ranks, _ = run_world(3, compared, lines)
    assert shown in ranks[0] and ranks == [ranks[0]] * 3


def traded(group: Any, copies: int) -> list[Any]:
    """Return the pieces of several concurrent all-to-alls, some of them unequal or empty."""
    comm, rank = Comm(group), group.rank()
    sent, received = ([1, 4], [1, 1]) if rank == 0 else ([1, 0], [4, 0])
    under_way = []
    for copy in range(copies):
        inputs = torch.arange(sum(sent), dtype=torch.float32) + 100 * rank + 10 * copy
        outputs = torch.zeros(sum(received))
        under_way.append((comm.all_to_all(outputs, inputs, received, sent), inputs, outputs))
    found = []
    for work, inputs, outputs in under_way:
        work.wait()
        pieces = list(outputs.split(received))
        pieces[rank] = inputs.split(sent)[rank]
        found.append([piece.tolist() for piece in pieces])
    return found


def test_pieces_of_several_exchanges_arrive_where_they_belong_over_gloo(gloo: SpawnedWorld):
    first, second = gloo.run(traded, 3)
    for copy in range(3):
        at = 10.0 * copy
        assert first[copy] == [[at], [100.0 + at]]
        assert second[copy] == [[at + n for n in (1, 2, 3, 4)], []]


def act(group: Any, errors: dict[int, Exception], calls: dict[int, str], method: str) -> Any:
    """Return the result or the exception of ``together`` or ``collect`` on this rank."""

    def fn() -> int:
        if group.rank() in errors:
            raise errors[group.rank()]
        return 10 * group.rank()

    try:
        return getattr(Comm(group), method)(fn, CPU, calls.get(group.rank(), "save"))
    except Exception as error:
        return error


def test_what_succeeds_on_all_ranks_costs_one_collective_of_8_bytes_per_rank():
    assert run_world(3, act, {}, {}, "collect")[0] == [[0, 10, 20]] * 3
    ranks, world = run_world(3, act, {}, {}, "together")
    assert ranks == [0, 10, 20]
    assert [(c.op, c.nbytes) for c in world.logs[0]] == [("all_gather_single", 24)]


# The errors of some ranks, and the error on the others.
FAILED: list[tuple[dict[int, Exception], type[Exception], str]] = [
    ({1: ValueError("bad")}, ValueError, "rank 1: bad"),
    ({1: TypeError("bad")}, TypeError, "rank 1: bad"),
    ({1: OSError(28, "No space")}, RuntimeError, "rank 1: [Errno 28] No space"),
    ({1: KeyError("name")}, RuntimeError, "rank 1: KeyError: 'name'"),
    (
        {0: ValueError("bad"), 3: ValueError("bad"), 1: OSError("full")},
        RuntimeError,
        "ranks 0, 3: bad; rank 1: full",
    ),
]


@pytest.mark.parametrize("method", ["together", "collect"])
@pytest.mark.parametrize(("errors", "kind", "message"), FAILED, ids=[case[2] for case in FAILED])
def test_ranks_that_fail_raise_their_own_error_and_the_others_name_each_message_once(
    errors: dict[int, Exception], kind: type[Exception], message: str, method: str
):
    for rank, raised in enumerate(run_world(4, act, errors, {}, method)[0]):
        if rank in errors:
            assert raised is errors[rank]
        else:
            assert type(raised) is kind and str(raised) == message


@pytest.mark.parametrize("method", ["together", "collect"])
def test_ranks_that_meet_in_different_calls_are_told_so_on_every_rank(method: str):
    for error in run_world(3, act, {}, {2: "save_async"}, method)[0]:
        assert type(error) is RuntimeError
        assert "ranks 0, 1: save; rank 2: save_async; make the same calls" in str(error)


# -- one warning per job --------------------------------------------------------------------------


def ranks_warn(group: Any) -> None:
    comm = Comm(group)
    comm.steps = 12
    warn_first("one rank has it")
    warn_first("one rank has it")
    if group.rank() == 1:
        warn_first("rank 1 alone has this")
    warn_once_for(comm, "all ranks know")
    warn_first(f"rank {group.rank()} says it so", "in its own words")
    comm.watch.end(comm)


SAID = [
    "all ranks know (after 12 steps)",
    "one rank has it (first on rank N, after 12 steps)",
    "rank 1 alone has this (first on rank 1, after 12 steps)",
    "rank N says it so (first on rank N, after 12 steps)",
]


def anonymous(messages: list[str]) -> list[str]:
    """Replace the rank numbers: either rank may be the first."""
    return sorted(
        text if "alone" in text else text.replace("rank 0", "rank N").replace("rank 1", "rank N")
        for text in messages
    )


def test_each_warning_is_said_once_by_one_of_the_threads(recwarn: pytest.WarningsRecorder):
    warnings.simplefilter("always")
    ThreadedWorld(2).run(ranks_warn)
    assert anonymous([str(each.message) for each in recwarn.list]) == SAID


def told(group: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks_warn(group)
    return [str(each.message) for each in caught]


def test_each_warning_is_said_once_by_one_of_the_processes(gloo: SpawnedWorld):
    first, second = gloo.run(told)
    assert anonymous(first + second) == SAID
    assert first.count(SAID[0]) == 1 and SAID[2] in second
