"""Gradients from real backward passes, reduced to their owners, compared with plain torch.

STORIES_SEED, a number, draws other random sequences, as in a nightly run.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, on_each_rank, packed_of, run_world, sgd, sharded, values
from pairwise import SEED, pairwise, thinned
from sequences import (
    ALL,
    COUNT,
    EVERY,
    STORAGE,
    WAYS,
    Action,
    BoomError,
    Cell,
    Fail,
    Give,
    Side,
    Use,
    compare,
    plain,
    random_sequence,
)
from torch import Tensor, nn

from shardcast import _compat
from shardcast.testing import SpawnedWorld, ThreadedWorld

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:no_sync"),
]


def use(*numbers: int) -> Use:
    return frozenset(numbers)


APART = (use(0, 2, 4), use(1, 2, 3))
FIRST: Action = (Side.backward, (0, ALL[:2]))
LAST: list[Action] = [(Side.backward, (2, APART)), (Side.step, ())]
SEQUENCES: dict[str, list[Action]] = {
    "a step twice": [(Side.backward, (0, APART)), (Side.step, ()), (Side.step, ())],
    "one cleared between two backwards": [
        FIRST,
        (Side.clear_some, (3,)),
        (Side.backward, (1, APART)),
        (Side.clip, ()),
        (Side.step, ()),
    ],
    **{
        f"{begun} upon {name}, cleared": [
            (Side.backward, (0, uses)),
            action,
            (Side.clear, ("model",)),
            *LAST,
        ]
        for name, uses in (("all", ALL[:2]), ("some", APART))
        for begun, action in (
            ("quiet", (Side.backward, (1, ALL[:2], True))),
            ("failed", (Side.failed, (1, ALL[:2], 1))),
        )
    },
    "a clip of nothing, and a gather": [(Side.clip, ()), (Side.gather, ()), (Side.step, ())],
    "failed upon clipped means": [FIRST, (Side.clip, ()), (Side.failed, (1, ALL[:2], 4)), *LAST],
    "ten backwards, of which one is reduced": [
        *((Side.backward, (seed, ALL[:2], True)) for seed in range(9)),
        FIRST,
        (Side.step, ()),
    ],
    "failed after some packs were sent, cleared, and stepped": [
        FIRST,
        (Side.failed, (1, ALL[:2], 0)),
        (Side.clear, ("model",)),
        (Side.step, ()),
        *LAST,
    ],
    "failed after some packs were sent, one cleared": [
        FIRST,
        (Side.failed, (1, ALL[:2], 0)),
        (Side.clear_some, (3,)),
        (Side.clip, ()),
        *LAST,
    ],
    **{
        f"{begun} upon used ones, cleared": [
            FIRST,
            (Side.step, ()),
            action,
            (Side.clear, ("model",)),
            *LAST,
        ]
        for begun, action in (
            ("quiet", (Side.backward, (1, ALL[:2], True))),
            ("failed", (Side.failed, (1, ALL[:2], 1))),
        )
    },
    "cleared by the model, quiet upon all on one rank, and cleared": [
        FIRST,
        (Side.clear, ("model",)),
        (Side.backward, (1, (EVERY, EVERY - {0}), True)),
        (Side.clear, ("none",)),
        *LAST,
    ],
    "quiet upon all, cleared, quiet upon some": [
        FIRST,
        (Side.backward, (1, ALL[:2], True)),
        (Side.clear, ("none",)),
        (Side.backward, (2, APART, True)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ],
    "zeroed after one that failed where another rank's had been used": [
        (Side.backward, (0, (use(3), use(4)))),
        (Side.step, ()),
        (Side.failed, (1, (use(0, 4), use(0, 2, 4)), 0)),
        (Side.clear, ("zeros",)),
        (Side.backward, (2, (use(3), use(4)))),
        (Side.step, ()),
    ],
    "two that fail upon means, the second one before it comes as far": [
        (Side.backward, (0, (EVERY, EVERY - {0}))),
        (Side.failed, (1, ALL[:2], 0)),
        (Side.failed, (2, ALL[:2], 2)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ],
    **{
        f"a hook fails at {number} upon means, cleared: {bool(clear)}": [
            FIRST,
            (Side.hook_fails, (1, ALL[:2], number)),
            *clear,
            *LAST,
        ]
        for number in (0, 3, 4)
        for clear in ([], [(Side.clear, ("model",))])
    },
    **{
        f"failed after nested ones of other parameters on each rank, cleared: {bool(clear)}": [
            (Side.nested, (0, APART)),
            (Side.step, ()),
            (Side.clear, ("none",)),
            (Side.failed, (1, ALL[:2], 0)),
            *clear,
            *LAST,
        ]
        for clear in ([], [(Side.clear, ("none",))])
    },
    "quiet upon used ones, cleared by the model, then zeroed": [
        FIRST,
        (Side.step, ()),
        (Side.backward, (1, ALL[:2], True)),
        (Side.clear, ("model",)),
        (Side.clear, ("zeros",)),
        (Side.step, ()),
        *LAST,
    ],
    "quiet upon some after one that failed, then zeroed": [
        (Side.failed, (1, (use(0, 2),) * 2, 2)),
        (Side.backward, (2, (use(2, 3, 4), use(1, 2, 4)), True)),
        (Side.clear, ("zeros",)),
        (Side.step, ()),
        *LAST,
    ],
    **{
        f"failed at {places}, {'cleared by the model' if clear else 'kept'}, {then}": [
            FIRST,
            (Side.failed_apart, (1, places)),
            *([(Side.clear, ("model",))] if clear else []),
            *([(Side.backward, (2, APART, True))] if then == "quiet" else []),
            *(LAST if then == "backward" else LAST[1:]),
        ]
        for places in ((1, 3), (5, 0))
        for clear, then in ((True, "backward"), (True, "step"), (True, "quiet"), (False, "step"))
    },
    "quiet upon all on one rank, cleared by the model, and a hook fails": [
        FIRST,
        (Side.backward, (1, (EVERY, EVERY - {0}), True)),
        (Side.clear, ("model",)),
        (Side.hook_fails, (2, (use(1, 2, 3),) * 2, 3)),
        (Side.step, ()),
        *LAST,
    ],
    "a hook fails, and the step follows": [
        FIRST,
        (Side.hook_fails, (1, ALL[:2], 4)),
        (Side.step, ()),
        (Side.step, ()),
        *LAST,
    ],
    "a hook fails upon used means": [
        FIRST,
        (Side.step, ()),
        (Side.hook_fails, (1, ALL[:2], 2)),
        *LAST,
    ],
    **{
        f"zeros are added to, gathered: {bool(gather)}, {then}": [
            FIRST,
            *gather,
            (Side.clear, ("zeros",)),
            (Side.add_one, (1, 3, 4)),
            *([(Side.backward, (2, APART, True))] if then == "quiet" else []),
            *([(Side.backward, (2, APART))] if then == "backward" else []),
            (Side.step, ()),
        ]
        for gather in ([], [(Side.gather, ())])
        for then in ("backward", "quiet", "step")
    },
    **{
        f"one cleared after the last, quiet: {quiet}": [
            FIRST,
            (Side.backward, (1, ALL[:2], quiet)),
            (Side.clear_some, (3,)),
            (Side.step, ()),
            (Side.step, ()),
        ]
        for quiet in (False, True)
    },
    **{
        f"one frozen between two backwards, the second fails: {fails}": [
            FIRST,
            (Side.backward, (1, ALL)),
            (Side.freeze, (3,)),
            (Side.failed, (2, ALL, 2)) if fails else (Side.backward, (2, APART)),
            (Side.step, ()),
        ]
        for fails in (False, True)
    },
    **{  # gradients of 1 and of 4 exist on one rank; each rank owns a part of a pack
        f"{cleared} cleared, in no norm, quiet: {quiet}": [
            (Side.backward, (825, ALL[:2])),
            (Side.step, ()),
            (Side.clear, ("none",)),
            (Side.backward, (439, (use(0, 1, 2, 3), use(0, 2, 3, 4)), quiet)),
            (Side.clear_some, cleared),
            (Side.clip, ()),
            (Side.step, ()),
        ]
        for cleared in ((0, 1, 2, 3, 4), (1,), (4,), (0, 1), (1, 3, 4))
        for quiet in (False, True)
    },
}


OTHERS = [
    (Cell(), "sharded"),
    (Cell("bf16", size=1), "local"),
    (Cell("bf16", "shard_ranks", "AdamW"), "local"),
    (Cell("bf16", "copy along tp", "AdamW"), "local"),
]


@pytest.mark.parametrize(
    ("name", "cell", "accumulate"),
    [
        *((name, Cell(), "local") for name in SEQUENCES),
        *((name, *how) for name, how in thinned(3, SEQUENCES, OTHERS)),
    ],
    ids=str,
)
def test_means_that_are_begun_upon_or_cleared_count_as_in_plain_torch(
    name: str, cell: Cell, accumulate: str
):
    """Includes copies of shards, where a rank has all of a mean, and sums over a mesh."""
    if cell.size > 1 or all(method is not Side.failed_apart for method, _ in SEQUENCES[name]):
        compare(SEQUENCES[name], cell, accumulate=accumulate)


def test_a_complete_pack_is_sent_by_the_next_gradient_of_whichever_pack():
    """Two groups with different flags put parameters alternately in two packs; the last pack is
    sent first."""

    def run(group: Any) -> list[tuple[int, int]]:
        model = nn.ParameterList(torch.ones(4) for _ in range(8))
        groups = [{"params": [*model][::2]}, {"params": [*model][1::2], "foreach": False}]
        optimizer = sharded(model, group, lambda _: torch.optim.SGD(groups, weight_decay=0.1))
        sent: list[tuple[int, int]] = []
        for number, param in enumerate(model):
            param.register_post_accumulate_grad_hook(
                lambda _param, number=number: sent.append((number, len(group.log)))
            )
        for _ in range(2):  # the first backward sends at its end
            begun = len(group.log)
            sent.clear()
            x = torch.zeros((), requires_grad=True)
            for param in model:
                x = Give.apply(x, param, torch.ones(4))
            x.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [(number, count - begun) for number, count in sent]

    expected = [(number, 0) for number in range(7, 0, -1)] + [(0, 1)]
    assert run_world(2, run)[0] == [expected] * 2


# -- in every form of storage, layout and optimizer ------------------------------------------------


def fits(storage: str, layout: str, kind: str, way: str, size: int) -> bool:
    if kind in ("Muon", "Adafactor") and (layout == "even" or storage in ("split16", "int8")):
        return False  # these keep whole masters and their own state
    if size == 1 and layout not in ("even", "whole"):
        return False
    return way != "published" or storage not in ("fp32", "split16")


LAYOUTS = "even", "whole", "shard_ranks", "shard_ranks: one", "copy along tp"
KINDS = "AdamW", "SGD", "Muon", "Adafactor"
CELLS = [
    Cell(*cell, pack_params=(2, 1, None)[number % 3])
    for number, cell in enumerate(pairwise(STORAGE, LAYOUTS, KINDS, WAYS, (1, 2, 3, 4), fits=fits))
]
USUAL: list[Action] = [
    (Side.backward, (1, ALL)),
    (Side.step, ()),
    (Side.clear, ("none",)),
    (Side.backward, (2, ALL)),
    (Side.backward, (1, ALL)),
    (Side.clip, ()),
    (Side.step, ()),
    (Side.clear, ("zeros",)),
    (Side.backward, (1, ALL)),
    (Side.step, ()),
]


def drawn(cell: Cell, number: int) -> list[Action]:
    draw = random.Random(1_000_003 * SEED + 100 * CELLS.index(cell) + number)
    return random_sequence(draw, assigns=cell.copies == 1)


ACCUMULATE = "local", "sharded"


@pytest.mark.parametrize(("cell", "accumulate"), thinned(2, CELLS, ACCUMULATE), ids=str)
def test_random_sequences_equal_plain_torch(cell: Cell, accumulate: str):
    compare(USUAL, cell, accumulate=accumulate)
    for number in range(2):
        compare(drawn(cell, number), cell, accumulate=accumulate)


@pytest.mark.parametrize(("cell", "accumulate"), thinned(2, CELLS[::4], ACCUMULATE), ids=str)
def test_random_sequences_with_clips_equal_plain_torch(cell: Cell, accumulate: str):
    """Gradients stay clipped until they are cleared, for a second step, a read or a backward."""
    draw = random.Random(1_000_003 * SEED + 7 + CELLS.index(cell))
    fp32 = cell._replace(storage="fp32", kind="SGD", way="plain")
    for _ in range(4):
        compare(random_sequence(draw, cell.copies == 1, (0.5, 2.0)), fp32, accumulate=accumulate)
    for bounds in ((0.5, 2.0), (2.0, 0.5)):  # the second clip applies to clipped gradients
        clips: list[Action] = [(Side.clip, (bound,)) for bound in bounds]
        compare([(Side.backward, (1, ALL)), *clips, (Side.step, ())], fp32, accumulate=accumulate)


@pytest.mark.parametrize(("cell", "accumulate"), thinned(2, CELLS[::3], ACCUMULATE), ids=str)
def test_random_sequences_in_which_ranks_fail_at_places_of_their_own_equal_plain_torch(
    cell: Cell, accumulate: str
):
    """If it fails on some ranks only, all ranks clear its gradients."""
    draw = random.Random(1_000_003 * SEED + CELLS.index(cell))
    actions: list[Action] = [(Side.backward, (0, ALL)), (Side.step, ()), (Side.clear, ("none",))]
    for seed in range(1, 10):
        kind = draw.choice(
            ("failed", "failed", "ends", "backward", "step", "clip", "gather", "clear")
        )
        places = tuple(draw.randint(0, COUNT) for _ in range(4))
        if kind == "ends":
            some = tuple(draw.choice((-1, place)) for place in places)
            actions += [(Side.failed_apart, (seed, some)), (Side.clear, ("none",))]
        elif kind == "failed":
            actions.append((Side.failed_apart, (seed, places)))
        elif kind == "clear":
            actions.append((Side.clear, (draw.choice(("none", "zeros", "model")),)))
        else:
            arguments = (seed, ALL) if kind == "backward" else ()
            actions.append((getattr(Side, kind), arguments))
    compare([*actions, (Side.step, ())], cell, accumulate=accumulate)


@pytest.mark.parametrize("cell", thinned(3, [cell for cell in CELLS if cell.size == 2]), ids=str)
def test_two_processes_equal_plain_torch(cell: Cell, gloo: SpawnedWorld):
    compare(USUAL, cell, gloo, "sharded")
    compare(drawn(cell, 0), cell, gloo)


@pytest.mark.parametrize("cell", thinned(3, [cell for cell in CELLS if cell.size == 4]), ids=str)
def test_four_processes_equal_plain_torch(cell: Cell, four: SpawnedWorld):
    compare(drawn(cell, 0), cell, four)


# -- gradients assigned or cleared between backwards -----------------------------------------------


@pytest.mark.parametrize("last", [LAST, LAST[1:]], ids=["a backward", "a step"])
def test_all_ranks_assign_what_some_got_in_no_sync_after_a_clear(last: list[Action]):
    """Some ranks notice the clear when a gradient arrives, others when one is assigned."""
    actions = [
        FIRST,
        (Side.clear, ("model",)),
        (Side.backward, (1, APART, True)),
        (Side.assign, (5, use(1, 2, 4))),
        *last,
    ]
    for layout in ("even", "shard_ranks", "whole"):
        compare(actions, Cell(layout=layout, pack_params=None))


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_raise_for_what_one_assigned_alone_or_to_another_parameter(
    size: int, accumulate: str
):
    def run(group: Any, others: int | None) -> None:
        side = Side(Cell(size=size), group, accumulate)
        side.backward(0, ALL)
        if accumulate == "sharded":
            side.backward(5, ALL, quiet=True)
        number = 2 if group.rank() == 1 else others
        if number is not None:
            side.assign(9, use(number))
        side.backward(10, ALL)
        told = r"assigned between two backwards of a step differs .*rank 1: 'layers.2"
        alike = others == 2
        with contextlib.nullcontext() if alike else pytest.raises(RuntimeError, match=told):
            side.step()

    for others in (None, 1, 2):
        ThreadedWorld(size).run(run, others)


@pytest.mark.parametrize("by", [(0,), (3,), (0, 1, 2, 3)])
@on_each_rank({"dp": 2, "tp": 2})
def test_all_ranks_raise_where_what_is_assigned_is_summed_over_model_parallel_ranks_too(
    mesh: Any,
    by: tuple[int, ...],
):
    """It is unknown whether the tensor is a part of that sum or all of it."""
    model = nn.ParameterList(torch.ones(4) for _ in range(2))
    optimizer = sharded(model, None, sgd, mesh=mesh, grad_sum_over={"tp": ["1"]})
    for step in range(2):
        model[0].sum().add(model[1].sum()).backward()
        if step and mesh.get_rank() in by:
            model[1].grad = torch.ones(4)
        model[0].sum().add(model[1].sum()).backward()
        told = r".grad of '1' was assigned .* summed over model-parallel ranks"
        with pytest.raises(RuntimeError, match=told) if step else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_takes_the_place_of_zeros_is_no_difference_between_ranks(size: int):
    """If only one rank has a backward in a step, all ranks may still edit their gradients."""

    def train(group: Any) -> list[Tensor]:
        model = CASES["mlp"].build()
        optimizer: Any = sgd(model) if group is None else sharded(model, group, sgd)
        for step in range(3):
            if group is None or group.rank() == 0:
                with contextlib.nullcontext() if group is None else optimizer.no_sync():
                    CASES["mlp"].loss(model, CASES["mlp"].batch(step)).backward()
            for param in model.parameters():
                if type(param.grad) is Tensor:  # not the stand-ins, whose means are zeros
                    param.grad = param.grad * (0.5 / size if group is None else 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [param.detach().clone() for param in model.parameters()]

    expected = train(None)
    for params in ThreadedWorld(size).run(train):
        for mine, right in zip(params, expected, strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("layout", ["even", "shard_ranks: one"])
@pytest.mark.parametrize("places", [(COUNT, 1), (0, COUNT)], ids=str)
def test_a_norm_after_a_backward_that_failed_is_refused_on_all_ranks(
    layout: str, places: Sequence[int]
):
    """A rank without a gradient must not skip the norm while others wait for it."""
    usual = failed_apart(places, "step")[:-2]
    for before in ([], [(Side.gather, ())]):
        actions = [*usual[:3], (Side.backward, (4, ALL)), *before, *usual[3:], (Side.norm, ())]
        with pytest.raises(RuntimeError, match=r"reads \.grad") as told:
            compare(actions, Cell(layout=layout, size=2, pack_params=2))
        assert told.value.__notes__[-1].endswith("raised RuntimeError"), "on the other rank, too"


@pytest.mark.parametrize(
    ("places", "which", "packs", "act"),
    pairwise(
        ((0, COUNT), (1, 3), (2, 2), (-1, 2), (COUNT,) * 3),
        ((0, 1, 2, 3, 4), (1, 3)),
        (("even", 1), ("even", 2), ("shard_ranks: one", 1)),
        ("step", "backward", "gather", "clear"),
    ),
    ids=str,
)
def test_what_is_assigned_while_a_failed_backward_waits_is_refused(
    places: Sequence[int], which: Sequence[int], packs: tuple[str, int], act: str
):
    """Some ranks may have averaged the replaced gradients. After a clear, assigning is allowed."""
    another: Action = (Side.backward, (6, ALL))
    acts: dict[str, list[Action]] = {
        "step": [],
        "backward": [another],
        "gather": [(Side.gather, ())],
        "clear": [(Side.clear, ("none",)), another],
    }
    actions = [
        *failed_apart(places, "step")[:-2],
        (Side.clear, ("model",)),
        (Side.assign, (5, use(*which))),
        *acts[act],
        (Side.step, ()),
    ]
    told = r"gradients were assigned after a backward that failed.*layers.\d.weight.*zero_grad"
    with contextlib.nullcontext() if act == "clear" else pytest.raises(RuntimeError, match=told):
        compare(actions, Cell(layout=packs[0], size=len(places), pack_params=packs[1]))


@pytest.mark.parametrize(("is_used", "value"), [(True, -1.0), (False, 0.5)])
@on_each_rank(2)
def test_a_group_that_is_added_after_the_backward_has_its_gradients_averaged(
    group: Any, is_used: bool, value: float
):
    """Also if one rank has no gradient, which counts as zero."""
    model = nn.ParameterList(torch.ones(4) for _ in range(2))
    optimizer = sharded(model, group, lambda m: torch.optim.SGD([m[0]], lr=1.0))
    loss = model[0].sum()
    if is_used or group.rank() == 0:
        loss = loss + (1.0 + 2 * group.rank()) * model[1].sum()
    loss.backward()
    optimizer.add_param_group({"params": [model[1]]})
    optimizer.step()
    assert [float(param.detach().unique()) for param in model] == [0.0, value]


@pytest.mark.parametrize(
    ("numbers", "again", "told"),
    [
        ((3,), True, r"cleared or assigned between .* rank 1: 'layers.3"),
        ((), True, r"clears of their gradients differs .*rank 1: 1"),
        ((3,), False, r"'layers\.3\.weight' .* rank 1: cleared"),
    ],
    ids=["one between two backwards", "all between them", "one after the last"],
)
@on_each_rank(2)
def test_gradients_that_one_rank_alone_clears_are_an_error_on_all(
    group: Any, numbers: tuple[int, ...], again: bool, told: str
):
    side = Side(Cell(), group)
    side.backward(0, ALL)
    if group.rank() == 1:
        side.clear_some(*numbers) if numbers else side.clear("none")
    if again:
        side.backward(1, ALL)
    with pytest.raises(RuntimeError, match=told):
        side.step()
    if numbers:  # in the next step, clear before the backward
        side.optimizers[0].zero_grad()
        side.backward(1, ALL)
        side.clear_some(3)
        side.step()


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_backward_that_fails_in_the_loss_on_one_rank_counts_as_none_there(backwards: int):
    """The step sends zeros for it. If the rank also ran another backward, the ranks hang."""

    def run(group: Any) -> Tensor:
        model = nn.ParameterList([torch.zeros(4)])
        optimizer = sharded(model, group, sgd)
        for number in range(backwards):
            loss = model[0].sum()
            if number == backwards - 1 and group.rank() == 1:
                loss = Fail.apply(loss)
            with contextlib.suppress(BoomError):
                loss.backward()
        optimizer.step()
        return model[0].detach()

    if backwards == 1:
        for weight in ThreadedWorld(2).run(run):
            assert torch.equal(weight, torch.full((4,), -0.05))
        return
    with pytest.raises(RuntimeError, match=r"ranks? .*(wait|all_to_all)"):
        ThreadedWorld(2).run(run)


AFTER: dict[str, list[Action]] = {
    "step": [(Side.step, ())],
    "clip": [(Side.clip, ()), (Side.step, ())],
    "gather": [(Side.gather, ()), (Side.step, ())],
    "cleared": [(Side.clear, ("none",)), (Side.step, ())],
    "zeroed": [(Side.clear, ("zeros",)), (Side.backward, (5, ALL)), (Side.step, ())],
    "again": [(Side.backward, (5, ALL)), (Side.step, ())],
    "cleared, again": [(Side.clear, ("none",)), (Side.backward, (5, ALL)), (Side.step, ())],
    "again and again": [(Side.failed_apart, (5, (COUNT, 0, 3))), (Side.backward, (6, ALL))],
}


def failed_apart(places: Sequence[int], after: str) -> list[Action]:
    """Fail after a complete step, since the first backward sends nothing before its end."""
    usual: list[Action] = [(Side.backward, (2, ALL)), (Side.step, ()), (Side.clear, ("none",))]
    return [*usual, (Side.failed_apart, (3, places)), *AFTER[after], (Side.step, ())]


@pytest.mark.parametrize(
    ("places", "after", "how"),
    thinned(
        3,
        [(0, COUNT), (COUNT, 0), (3, COUNT, 0), (COUNT, COUNT, 2)],
        AFTER,
        [("even", "local"), ("whole", "sharded")],
    ),
    ids=str,
)
def test_a_backward_that_fails_on_each_rank_at_another_place_is_one_pass_on_all(
    places: Sequence[int], after: str, how: tuple[str, str]
):
    """Gradients that arrived count, and no rank hangs, even if it fails before its first one."""
    cell = Cell(layout=how[0], size=len(places), pack_params=1)
    compare(failed_apart(places, after), cell, accumulate=how[1])


def test_processes_whose_backward_fails_at_another_place_on_each_do_not_wait(gloo: SpawnedWorld):
    for after in ("step", "cleared, again", "again and again"):
        compare(failed_apart((0, COUNT), after), Cell(pack_params=1), gloo)


@pytest.mark.parametrize(
    "places", [(-1, 0), (-1, 2), (-1, 4), (-1, COUNT), (-1, COUNT, 0)], ids=str
)
def test_a_backward_that_fails_on_some_ranks_alone_is_an_error_on_all(places: Sequence[int]):
    """The step sends the packs that the backward did not send, so no rank hangs."""
    cell = Cell(size=len(places), pack_params=1)

    def run(group: Any) -> None:
        side = Side(cell, group)
        for method, arguments in failed_apart(places, "step")[:-2]:
            method(side, *arguments)
        with pytest.raises(RuntimeError, match=r"of a step that failed .*ranks? 1[, 2]*: 1"):
            side.step()
        side.clear("none")
        side.backward(2, ALL)
        side.step()

    ThreadedWorld(cell.size).run(run)
    compare(failed_apart(places, "cleared, again"), cell)


@pytest.mark.parametrize("call", ["full_state_dict", "check_copies", "digest", "close"])
@on_each_rank(2)
def test_a_call_of_all_ranks_ends_the_pass_of_a_backward_that_failed(group: Any, call: str):
    side = Side(Cell(pack_params=1), group)
    for method, arguments in failed_apart((3, COUNT), "step")[:-2]:
        method(side, *arguments)
    for optimizer in side.optimizers:
        getattr(optimizer, call)()


# -- streams, and gradients in flight --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_copied_after_all_streams_that_made_them(
    size: int, monkeypatch: pytest.MonkeyPatch
):
    """Autograd runs each node on the stream of its forward, so streams differ within a pack."""
    current = threading.local()
    waited: list[set[str]] = []
    monkeypatch.setattr(_compat, "current_stream", lambda _: current.stream)
    monkeypatch.setattr(_compat, "wait_streams", lambda streams, _: waited.append({*streams}))

    def run(group: Any) -> None:
        model = nn.ParameterList(torch.ones(4) for _ in range(4))
        optimizer = sharded(model, group, sgd, pack_params=3)
        for bucket in packed_of(optimizer).reduce.buckets.values():
            bucket.streams = set()  # as on an accelerator
        loss = torch.zeros(())
        for number, param in enumerate(model):
            out = param.exp()
            out.register_hook(lambda _, n=number: setattr(current, "stream", f"stream {n}"))
            loss = loss + out.sum()
        loss.backward()
        optimizer.step()

    ThreadedWorld(size).run(run)
    assert waited.count({"stream 0", "stream 1", "stream 2"}) == size, waited


def zero_what_was_sent(group: Any) -> list[dict[str, Tensor]]:
    """Zero gradients after a backward that failed at its last one, with other packs in flight."""
    side = Side(Cell(pack_params=1), group)
    side.backward(0, ALL[:2])
    side.step()
    side.clear("none")
    side.failed(1, ALL[:2], 0)
    with pytest.raises(RuntimeError, match=r"\.grad of 'layers\.[12]\..* zeroed in place"):
        side.models[0].zero_grad(set_to_none=False)
    side.clear("none")
    side.backward(3, ALL[:2])
    side.step()
    return [values(model) for model in side.models]


def test_gradients_that_are_zeroed_on_their_way_are_told_of_and_training_goes_on(
    gloo: SpawnedWorld,
):
    actions: list[Action] = [
        (Side.backward, (0, ALL[:2])),
        (Side.step, ()),
        (Side.clear, ("none",)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ]
    expected = plain(Cell(), actions)[-2:]
    for models in gloo.run(zero_what_was_sent):
        for params, of_plain in zip(models, expected, strict=True):
            assert_same_bits(params, of_plain)
