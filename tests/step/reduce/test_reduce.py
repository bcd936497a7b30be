"""Gradients on their way to the owner, from real backward passes, against torch.optim."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, Branches, assert_same_bits, run_world, sharded, values
from torch import Tensor, nn

from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(60)

Use = tuple[int, ...]  # the layers that one backward uses
Plan = list[list[list[Use]]]  # per step and rank, what each backward uses
ALL = (0, 1, 2, 3)
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "sgd": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False
    ),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, foreach=False),
}
ZERO: dict[str, Callable[[Any, nn.Module], None]] = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(),
    "model": lambda optimizer, model: model.zero_grad(),
    "to zero": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "never": lambda optimizer, model: None,
}


def branches() -> Branches:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Branches()


def loss(model: nn.Module, step: int, rank: int, micro: int, use: Use) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank * 10 + micro)
    x, y = (torch.randn(3, 5, generator=generator) for _ in range(2))
    return F.mse_loss(model(x, use), y)


def oracle(plan: Plan, kind: str, zero: str) -> nn.Module:
    """One process with torch.optim: the mean over ranks, where absent counts as zero."""
    model = branches()
    optimizer = MAKERS[kind](model)
    for step, ranks in enumerate(plan):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank, micros in enumerate(ranks):
            local: dict[nn.Parameter, Tensor] = {}
            for micro, use in enumerate(micros):
                params = [p for number in use for p in model.layers[number].parameters()]
                grads = torch.autograd.grad(loss(model, step, rank, micro, use), params)
                for param, grad in zip(params, grads, strict=True):
                    local[param] = local[param] + grad if param in local else grad
            for param, grad in local.items():
                sums[param] = sums.get(param, torch.zeros(())) + grad.double()
        for param, total in sums.items():
            mean = (total / len(ranks)).float()
            param.grad = mean if param.grad is None else param.grad + mean
        optimizer.step()
        ZERO[zero](optimizer, model)
    return model


def train(
    group: Any, plan: Plan, kind: str, zero: str, mode: str, fields: dict[str, Any]
) -> dict[str, Tensor]:
    rank = group.rank()
    model = branches()
    optimizer = sharded(model, group, MAKERS[kind], **fields)
    for step, ranks in enumerate(plan):
        micros = ranks[rank]
        longest = max(len(theirs) for theirs in ranks)
        for micro, use in enumerate(micros):
            last = micro + 1 == longest
            quiet = mode == "no_sync" and not last
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                loss(model, step, rank, micro, use).backward()
        optimizer.step()
        ZERO[zero](optimizer, model)
    return values(model)


def check(
    plan: Plan, kind: str = "adamw", zero: str = "optimizer", mode: str = "no_sync",
    exact: bool = True, **fields: Any,
) -> None:  # fmt: skip
    expected = values(oracle(plan, kind, zero))
    ranks, _ = run_world(len(plan[0]), train, plan, kind, zero, mode, fields)
    for mine in ranks:
        if exact:
            assert_same_bits(mine, expected)
        else:
            # Means of several rounds are rounded one by one: an ulp of gradients below 1 per
            # round and step, times a step size of at most 0.1, momentum's factor 10 included.
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=len(plan) * 2**-22)


PLANS: dict[str, Plan] = {
    "all present": [[[ALL], [ALL]]] * 3,
    "absent everywhere": [[[(0, 1)], [(0, 1)]]] * 3,
    "on one rank only": [[[(0, 1, 3)], [ALL]]] * 3,
    "on the other rank only": [[[ALL], [(1,)]]] * 3,
    "nothing in common": [[[(0, 2)], [(1, 3)]]] * 3,
    "one rank without any": [[[ALL], []]] * 3,
    "the first rank without any": [[[], [(1, 2)]]] * 3,
    "in some steps": [[[ALL], [ALL]], [[(1,)], [(1, 2)]], [[ALL], [ALL]], [[(0,)], [(3,)]]],
    "late start": [[[(0,)], [(0,)]], [[(0,)], [(0, 2)]], [[ALL], [ALL]], [[ALL], [ALL]]],
    "no rank in one step": [[[ALL], [ALL]], [[], []], [[ALL], [ALL]]],
    "three ranks": [[[(0,)], [(1,)], [(0, 2)]]] * 3,
}


@pytest.mark.parametrize(
    ("kind", "partition"),
    [("adamw", "even"), ("adamw", "whole"), ("sgd", "even"), ("rmsprop", "whole")],
)
@pytest.mark.parametrize("name", PLANS)
def test_absent_gradients_count_as_torch_would_count_them(name: str, kind: str, partition: str):
    check(PLANS[name], kind, partition=partition, pack_params=3)


@pytest.mark.parametrize("seed", range(8))
def test_random_patterns_of_absent_gradients_equal_torch(seed: int):
    choose = random.Random(seed)
    size = choose.choice([2, 3, 4])
    plan: Plan = [
        [
            [
                tuple(sorted(choose.sample(ALL, choose.randint(1, 4))))
                for _ in range(choose.choice([0, 1, 2]))
            ]
            for _ in range(size)
        ]
        for _ in range(4)
    ]
    partition, pack_params = choose.choice(["even", "whole"]), choose.choice([1, 3, None])
    check(plan, choose.choice(["adamw", "sgd"]), partition=partition, pack_params=pack_params)


@pytest.mark.parametrize("mode", ["no_sync", "sync"])
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_several_backwards_before_a_step_give_their_sum(mode: str, zero: str, partition: str):
    plan: Plan = [[[ALL] * 3, [ALL] * 3]] * 3
    exact = mode == "no_sync" and zero in ("optimizer", "model")
    check(plan, "sgd", zero, mode, exact, partition=partition, pack_params=3)


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("name", ["nothing in common", "in some steps", "late start"])
def test_absent_gradients_are_right_however_gradients_are_cleared(
    name: str, partition: str, zero: str
):
    exact = zero in ("optimizer", "model")
    check(PLANS[name], "sgd", zero, exact=exact, pack_params=3, partition=partition)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize(
    "micros",
    [[[ALL, (0,)], [ALL, (0,)]], [[(0,), (0,)], [ALL, ALL]], [[(1,), (2,)], [(3,), (0, 3)]]],
    ids=["absent later", "never on one rank", "here and there"],
)
def test_a_mean_reduced_earlier_is_kept_where_its_owner_has_no_gradient(
    micros: list[list[Use]], partition: str
):
    check([micros] * 2, "sgd", mode="sync", exact=False, partition=partition)


def test_stepping_twice_without_clearing_uses_the_same_gradients_again():
    def twice(group: Any) -> dict[str, Tensor]:
        model = branches()
        optimizer = (
            MAKERS["adamw"](model) if group is None else sharded(model, group, MAKERS["adamw"])
        )
        for rank in range(2) if group is None else [group.rank()]:
            share = loss(model, 0, rank, 0, (0, rank + 1))
            (share / 2 if group is None else share).backward()
        optimizer.step()
        optimizer.step()
        return values(model)

    for trained in run_world(2, twice)[0]:
        # Halved first or last is the same; the sum is rounded once.
        torch.testing.assert_close(trained, twice(None), rtol=0, atol=2**-23)


# -- different data on every rank -----------------------------------------------------------------


def train_on_part(group: Any, case: str, micros: int, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Three steps; each rank takes its part of the batch of 12, in ``micros`` pieces."""
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    model = CASES[case].build()
    optimizer = sharded(model, group, make, **fields)
    for step in range(3):
        x, y = CASES[case].batch(step, 12)
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        for number, part in enumerate(zip(x.chunk(micros), y.chunk(micros), strict=True)):
            last = number + 1 == micros
            with contextlib.nullcontext() if last else optimizer.no_sync():
                (CASES[case].loss(model, part) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def plain_on_all(case: str) -> dict[str, Tensor]:
    model = CASES[case].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        CASES[case].loss(model, CASES[case].batch(step, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def assert_rounding_apart(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """A gradient is a sum over 12 x 9 tokens in another order: below 1, so each differs by less
    than 2^-23 times a few; three steps of 0.1 with momentum weigh 0.1 x (1 + 1.9 + 2.7)."""
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=2**-21)


@pytest.mark.parametrize(("size", "micros"), [(1, 3), (2, 1), (2, 3), (4, 3)])
@pytest.mark.parametrize("case", ["mlp", "gpt", "gpt_reentrant", "gpt_nonreentrant",
                                  "tied_reentrant"])  # fmt: skip
def test_ranks_with_parts_of_a_batch_equal_plain_training_on_the_whole(
    case: str, size: int, micros: int
):
    expected = plain_on_all(case)
    fields = {"pack_params": 4}
    if size == 1:
        ranks = [train_on_part(None, case, micros, fields)]
    else:
        ranks, _ = run_world(size, train_on_part, case, micros, fields)
    for mine in ranks:
        assert_same_bits(mine, ranks[0])
        assert_rounding_apart(mine, expected)


def test_a_local_sum_instead_of_the_mean_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control of the comparison above: gradients of one's own data alone fail it."""
    from shardcast.step.reduce.bucket import Bucket

    land = Bucket.land

    def keep_own(self: Bucket) -> Tensor:
        own = self.grads.own.clone()
        received = land(self)
        self.grads.own.copy_(own)
        return received

    monkeypatch.setattr(Bucket, "land", keep_own)
    ranks, _ = run_world(2, train_on_part, "mlp", 1, {})
    with pytest.raises(AssertionError):
        assert_rounding_apart(ranks[0], plain_on_all("mlp"))


def gloo_on_part(group: Any, case: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train_on_part(group, case, 3, {"pack_params": 4})


def test_two_gloo_processes_with_halves_of_a_batch_equal_plain_training(gloo: SpawnedWorld):
    ranks = gloo.run(gloo_on_part, "gpt_reentrant")
    assert_same_bits(ranks[0], ranks[1])
    assert_rounding_apart(ranks[0], plain_on_all("gpt_reentrant"))
