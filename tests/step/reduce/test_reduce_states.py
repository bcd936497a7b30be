"""Random sequences of what moves the reducer's states, against plain torch, to the bit.

Gradients are multiples of 1/64, other ones on each rank, so their sums and means (of 1, 2 or 4
ranks) are exact whatever the order.
"""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.step.reduce import reduce_pass
from shardcast.step.reduce.bucket import State
from shardcast.step.reduce.reducer import Reducer
from shardcast.step.reduce.user_edits import GradientEdits
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(120)
COUNT = 5  # parameters of a model, in packs of two
Action = tuple[Callable[..., None], tuple[Any, ...]]


class BoomError(Exception):
    """A backward that fails on every rank."""


class Give(torch.autograd.Function):
    """Passes ``x`` on and gives the parameter just this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.saved_tensors[0], None


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise BoomError


class Chain(nn.Module):
    """Gradients come from the last parameter to the first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.all = nn.ParameterList(torch.randn(3 + n, generator=make) for n in range(COUNT))

    def forward(
        self, x: Tensor, grads: dict[int, Tensor], fails_at: int = -1, nests: bool = False
    ) -> Tensor:
        for number, grad in grads.items():
            if number == fails_at:
                x = Fail.apply(x)
            if nests:
                x = checkpoint(Give.apply, x, self.all[number], grad, use_reentrant=True)
            else:
                x = Give.apply(x, self.all[number], grad)
        return x


class Side:
    """One rank with two models or, without a group, plain torch with what all ranks have."""

    def __init__(self, ranks: int, group: Any = None, grads: str = "full") -> None:
        self.ranks, self.group = ranks, group
        self.models = Chain(0), Chain(1)
        self.optimizers: list[Any] = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            for model in self.models
        ]
        if group is not None:
            fields = {"param_dtype": "fp32", "pack_params": 2, "fuse": "eager", "grads": grads}
            self.optimizers = [
                shardcast.shard(model, optimizer, process_group=group, **fields)
                for model, optimizer in zip(self.models, self.optimizers, strict=True)
            ]
        self.seen: list[Any] = []

    def here(self) -> list[int]:
        return list(range(self.ranks)) if self.group is None else [self.group.rank()]

    def gradients(self, seed: int, use: frozenset[int]) -> dict[int, Tensor]:
        make, share = torch.Generator().manual_seed(seed), len(self.here())
        every = [torch.randint(-64, 65, (3 + n,), generator=make) / 64 for n in range(COUNT)]
        return {n: every[n] / share for n in sorted(use)}

    def backward(self, seed: int, use: Any, quiet: bool = False, **how: Any) -> None:
        optimizer = self.optimizers[0]
        for rank in self.here():
            with optimizer.no_sync() if quiet and self.group else contextlib.nullcontext():
                x = torch.zeros((), requires_grad=True)
                loss = self.models[0](x, self.gradients(seed + rank, use[rank]), **how)
                if loss.requires_grad and loss.grad_fn is not None:
                    with contextlib.suppress(BoomError):
                        loss.backward()

    def nested(self, seed: int, use: Any) -> None:
        self.backward(seed, use, nests=True)

    def failed(self, seed: int, use: Any, fails_at: int) -> None:
        """On all ranks, which must use the same parameters, at the same place."""
        self.backward(seed, use, fails_at=fails_at)
        if self.group is not None:
            assert self.optimizers[0].reduce._reduce_pass() is None, "nothing is left behind"

    def through_both(self, seed: int, use: Any) -> None:
        for rank in self.here():
            x = torch.zeros((), requires_grad=True)
            for number, model in enumerate(self.models):
                x = model(x, self.gradients(seed + rank + 10 * number, use[rank]))
            x.backward()

    def clear(self, zero: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if zero == "model":
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=zero == "none")

    def clip(self) -> None:
        params = list(self.models[0].parameters())
        if self.group is None:
            self.seen.append(torch.nn.utils.clip_grad_norm_(params, 1e30))
        else:
            self.seen.append(self.optimizers[0].clip_grad_norm_(1e30))

    def step(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.step()
            self.seen.append([param.detach().clone() for param in model.parameters()])


def sequence(choose: random.Random, sharded: bool) -> list[Action]:
    def subset() -> frozenset[int]:
        return frozenset(n for n in range(COUNT) if choose.random() < 0.7) | {2}

    actions: list[Action] = []
    clipped = False  # then gradients are only cleared by the optimizer, else the step is refused
    rare = choose.random() < 0.5  # what defers launches for good comes late or never
    for number in range(choose.randint(4, 14)):
        seed, use = choose.randrange(1000), tuple(subset() for _ in range(4))
        kinds = ["backward", "quiet", "step", "step", "clear", "clip", "failed"]
        if not rare or number > 6:
            kinds += ["nested", "both"]
        kind = choose.choice(kinds)
        if kind == "backward":
            actions.append((Side.backward, (seed, use)))
        elif kind == "quiet":
            actions.append((Side.backward, (seed, use, True)))
        elif kind == "nested":
            actions.append((Side.nested, (seed, use)))
        elif kind == "both":
            actions.append((Side.through_both, (seed, use)))
        elif kind == "failed":
            actions.append((Side.failed, (seed, use[:1] * 4, choose.choice(sorted(use[0])))))
        elif kind == "clear":
            zeros = ["none", "zeros"] if clipped else ["none", "zeros", "model"]
            actions.append((Side.clear, (choose.choice(zeros),)))
        else:
            actions.append((getattr(Side, kind), ()))
            if kind == "step" and sharded:  # their gradients are gone then
                actions.append((Side.clear, (choose.choice(["none", "zeros", "model"]),)))
        clipped = kind == "clip" or (clipped and kind not in ("step", "clear"))
    return [*actions, (Side.step, ())]


def play(side: Side, actions: list[Action]) -> list[Any]:
    for method, args in actions:
        method(side, *args)
    return side.seen


def compare(actions: list[Action], size: int, grads: str) -> None:
    expected = play(Side(size), actions)
    world = ThreadedWorld(size)
    results = world.run(lambda group: play(Side(size, group, grads), actions))
    assert_same_sequence(world.logs)
    for seen in results:
        for number, (mine, plain) in enumerate(zip(seen, expected, strict=True)):
            if isinstance(plain, Tensor):  # a norm
                torch.testing.assert_close(mine, plain, rtol=1e-6, atol=0)
            else:
                for left, right in zip(mine, plain, strict=True):
                    assert torch.equal(left, right), (number, actions)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*this clip is lost.*")
        yield


def run_many(grads: str, examples: int) -> None:
    for seed in range(examples):
        choose = random.Random(seed)
        compare(sequence(choose, grads == "sharded"), choose.choice([1, 2, 2, 4]), grads)


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_random_sequences_of_backwards_clears_and_steps_equal_plain_torch(grads: str):
    run_many(grads, 45)


@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("begun", ["quiet", "failed"])
def test_means_that_were_begun_upon_are_dropped_where_gradients_are_cleared_by_hand(
    begun: str, grads: str
):
    every = (frozenset(range(COUNT)),) * 2
    apart = (frozenset({0, 2, 4}), frozenset({1, 2, 3}))
    later: Action = (Side.backward, (1, every, True))
    if begun == "failed":
        later = (Side.failed, (1, every, 1))
    for first in (every, apart):
        actions = [(Side.backward, (0, first)), later, (Side.clear, ("model",))]
        compare([*actions, (Side.backward, (2, apart)), (Side.step, ())], 2, grads)


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_sequences_find_a_pass_that_a_failed_backward_leaves_undone(
    grads: str, monkeypatch: pytest.MonkeyPatch
):
    """The control: no pass is due after it, so what it did bring is not reduced."""
    new_pass = Reducer._new_pass

    def undue(self: Reducer) -> Any:
        due = self.due
        started = new_pass(self)
        self.due = due
        return started

    monkeypatch.setattr(Reducer, "_new_pass", undue)
    with pytest.raises((AssertionError, RuntimeError)):
        run_many(grads, 50)


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_clearing_some_gradients_between_two_backwards_of_a_step_is_refused_by_name(grads: str):
    def run(group: Any) -> None:
        side = Side(2, group, grads)
        every = (frozenset(range(COUNT)),) * 2
        side.backward(0, every)
        assert grads == "full" or side.models[0].all[3].grad is None, "which cannot be cleared"
        side.models[0].all[3].grad = None
        if grads == "sharded":
            return side.backward(1, every)
        with pytest.raises(RuntimeError, match=r"\.grad of 'all.3' was cleared"):
            side.backward(1, every)
        side.optimizers[0].zero_grad()
        side.backward(1, every)
        side.models[0].all[3].grad = None  # of the next step, and not between its backwards
        side.step()

    world = ThreadedWorld(2)
    world.run(run)
    assert_same_sequence(world.logs)


@pytest.mark.parametrize("last", ["sync", "no_sync"])
def test_a_gradient_cleared_after_the_last_backward_is_no_part_of_the_step(last: str):
    every = (frozenset(range(COUNT)),) * 2

    def one_cleared(side: Side) -> None:
        side.models[0].all[3].grad = None

    actions: list[Action] = [(Side.backward, (0, every)), (Side.backward, (1, every))]
    if last == "no_sync":
        actions[1] = (Side.backward, (1, every, True))
    compare([*actions, (one_cleared, ()), (Side.step, ()), (Side.step, ())], 2, "full")


def test_a_failed_backward_leaves_nothing_behind():
    def run(group: Any) -> None:
        gc.disable()  # the engine's callback holds the pass, and nobody else
        side = Side(2, group)
        every = (frozenset(range(COUNT)),) * 4
        side.backward(0, every)  # the next ones launch beside the backward
        side.optimizers[0].zero_grad()
        side.failed(1, every, 2)
        reducer = side.optimizers[0].reduce
        flying = [b for b in reducer.buckets.values() if b.state is State.IN_FLIGHT]
        assert len(flying) == 1, "packs that were sent are on their way"
        side.optimizers[0].zero_grad()
        side.backward(2, every)
        assert all(b.state is State.REDUCED for b in reducer.buckets.values())
        side.step()

    reduce_pass._PASSES.clear()  # an error that an earlier test kept has a pass of its own
    try:
        ThreadedWorld(2).run(run)
    finally:
        gc.enable()
    assert not any(reduce_pass._PASSES.values())


def test_another_gradient_in_the_place_of_the_last_one_is_another_version():
    """CPython gives the same address, so the same id, again and again."""

    def grads(param: nn.Parameter) -> Any:
        return SimpleNamespace(pack=SimpleNamespace(params=[param]))

    param = nn.Parameter(torch.zeros(3))
    edits, ids = GradientEdits([grads(param)]), []
    versions = [edits.version(), edits.version()]
    for _ in range(4):
        param.grad = torch.ones(3)
        ids.append(id(param.grad))
        versions += [edits.version(), edits.version()]
        param.grad = None
    assert len(set(ids)) < len(ids), "the control: ids do come again"
    assert versions == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
