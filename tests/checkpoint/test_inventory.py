"""What ranks hold between them, put together from names and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest

from shardcast.checkpoint.inventory import LocalInventory, Replica, merge
from shardcast.checkpoint.region import IndexRange, Region

pytestmark = pytest.mark.timeout(60)
WHOLE = Region.whole((4, 3))
UPPER, LOWER = (Region((4, 3), ((IndexRange(n, 2),), (IndexRange(0, 3),))) for n in (0, 2))


def copy(region: Region = WHOLE, primary: bool = True, stage: int = 0) -> Replica:
    return Replica(region, primary, True, False, (stage, 0))


def held(names: str, stage: int = 0, **more: Any) -> LocalInventory:
    some = names.split()
    return LocalInventory({name: copy(stage=stage) for name in some}, {}, [some], {}, **more)


ORDERS = {
    "one after the other": (["tokens a.0 a.1", "a.2 head"], "tokens a.0 a.1 a.2 head"),
    "interleaved": (["tokens a.0 a.2", "a.1 a.3 head"], "tokens a.0 a.1 a.2 a.3 head"),
    "there and back": (["tokens a.0 a.3 head", "a.1 a.2"], "tokens a.0 a.1 a.2 a.3 head"),
    "beyond nine": (["a.8.w a.8.b a.10.w", "a.9.w a.11.w"], "a.8.w a.8.b a.9.w a.10.w a.11.w"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_of_all_stages_are_in_the_order_of_the_whole_model(order: str):
    stages, expected = ORDERS[order]
    found = merge({number: held(names, number) for number, names in enumerate(stages)})
    assert found.groups == [expected.split()]


def test_buffers_are_stored_by_the_first_rank_that_has_them():
    ranks = {
        rank: held("w" if rank < 2 else "v", rank // 2)._replace(
            buffers={"mask": (UPPER, LOWER)[rank % 2], "mean": WHOLE}, extra=["x"]
        )
        for rank in range(4)
    }
    found = merge(ranks)
    assert found.buffers == {("mask", UPPER): 0, ("mask", LOWER): 1, ("mean", WHOLE): 0}
    assert found.extra == {"x": 0}


REFUSED = {
    "two stages": ([copy(), copy(stage=1)], "'w' is another one on ranks 0 and 1"),
    "a part is missing": ([copy(UPPER)], "hold 6 elements between them, it has 12"),
    "no copy counts": ([copy(primary=False)], "hold 0 elements between them"),
    "other shapes": ([copy(), copy(Region.whole((12,)), False)], "'w' is another one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_model_is_refused_by_name(case: str):
    copies, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        merge({n: LocalInventory({"w": part}, {}, [["w"]], {}) for n, part in enumerate(copies)})
