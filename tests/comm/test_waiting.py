"""Ranks that make other calls than the rest: the error says what this rank was waiting for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, sharded

from shardcast.comm import Comm, objects
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.testing import FakeGroup, SpawnedWorld

pytestmark = pytest.mark.timeout(90)

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def one_more(group: Any, what: str) -> str | None:
    """What rank 1 is told when it alone does ``what`` after two steps; rank 0 just returns."""
    # Long enough for a busy machine to set up, short enough for a test.
    with_limit: Any = dist.new_group(timeout=timedelta(seconds=5))
    model = CASES["gpt"].build()
    optimizer = sharded(model, with_limit, param_dtype=BF16, autocast=False, pack_params=6)
    for step in range(2):
        CASES["gpt"].loss(model, CASES["gpt"].batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier(with_limit)
    if group.rank() == 0:
        return None
    with pytest.raises(RuntimeError) as raised:
        if what == "state":
            optimizer.full_state_dict()
        CASES["gpt"].loss(model, CASES["gpt"].batch(2)).backward()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "waited"),
    [
        ("batch", "in an all-to-all of pack 4 ('blocks.1.proj.weight' and 3 more), after 2 steps"),
        ("state", "in an all-gather of full_state_dict, after 2 steps"),
    ],
)
def test_a_rank_that_does_one_thing_more_is_told_what_it_waited_for(
    gloo: SpawnedWorld, what: str, waited: str
):
    _, told = gloo.run(one_more, what)
    assert told.startswith(f"rank 1 of 2 waited for the other ranks {waited}, and the process")
    assert "imed out" in told, "gloo's own words are kept"
    for cause in ("one more batch, two steps", "ended", "/troubleshooting.md"):
        assert cause in told


class GivesUp(FakeGroup):
    """Raises the error of a backend whose peers do not come."""

    error: type[Exception] = RuntimeError

    def _issue(self, call: Any) -> dist.Work:
        raise self.error("Timed out waiting 1800000ms")


PACK = PackLayout(
    4, "cpu", BF16, True, 0, "", 8, (Slot("head.weight", (8,), 0, 8),),
    (Span(0, 0, 4), Span(1, 4, 8)),
)  # fmt: skip
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


@pytest.mark.parametrize("error", [RuntimeError, dist.DistBackendError])
@pytest.mark.parametrize("named", CALLS)
def test_every_collective_names_itself_and_whose_it_is(named: str, error: type[Exception]):
    group = GivesUp(1, 2)
    group.error = error
    comm = Comm(group)
    comm.steps = 12
    expected = f"rank 1 of 2 waited for the other ranks in {named}, after 12 steps"
    with pytest.raises(RuntimeError) as raised:
        CALLS[named](comm)
    assert str(raised.value).startswith(expected)
    assert isinstance(raised.value.__cause__, error)


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


def alone_for_a_while(group: Any, told: str) -> list[str]:
    """What this rank logs when rank 1 comes late to a call: after rank 0 has said so."""
    comm, messages = Comm(group), list[str]()
    comm.together(lambda: None, CPU, "load")  # nobody waits for long

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")
            Path(told).touch()

    objects.LOG.addHandler(handler := Handler())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objects, "PATIENCE", 0.3 if group.rank() == 0 else 60.0)
            while group.rank() == 1 and not Path(told).exists():
                time.sleep(0.02)
            comm.together(lambda: None, CPU, "save")
    finally:
        objects.LOG.removeHandler(handler)
    return messages


def test_a_rank_that_waits_for_long_says_so_once_and_in_which_call(
    gloo: SpawnedWorld, tmp_path: Path
):
    first, second = gloo.run(alone_for_a_while, str(tmp_path / "told"))
    (message,) = first
    assert message.startswith(
        "WARNING rank 0 of 2 has waited 0.3 s for the other ranks in save, after 0 steps"
    )
    assert second == [], "the one that came late"
