"""A state machine: what training scripts do, in random orders, against plain torch.

Gradients are multiples of 1/64 and come from real backward passes, other ones on each rank, so
their sums and means (of 1, 2 or 4 ranks) and the squares of their norms are exact, and parameters
must be equal to the bit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn

import shardcast
from shardcast import checkpoint
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(300)
SHAPES = ((5, 3), (7,), (), (2, 9), (11,), (4, 4))
NUMBERS = range(len(SHAPES))
LAST = (4, 5)  # come with a group of their own, later
KINDS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {  # and later options
    "AdamW": (
        torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1},
        [{"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"maximize": True}],
    ),
    "SGD": (
        torch.optim.SGD, {"lr": 0.1, "dampening": 0.25},
        [
            {"momentum": 0.9}, {"momentum": 0.0}, {"weight_decay": 0.01}, {"maximize": True},
            {"momentum": 0.5, "nesterov": True, "dampening": 0.0},
        ],
    ),
    "NAdam": (
        torch.optim.NAdam, {"lr": 1e-2},
        [{"betas": (0.5, 0.9)}, {"decoupled_weight_decay": True}, {"weight_decay": 0.1}],
    ),
    "RMSprop": (
        torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5},
        [{"momentum": 0.9}, {"alpha": 0.5}, {"eps": 1e-3}],
    ),
}  # fmt: skip
if torch.__version__ >= (2, 13):  # before, torch's own makes no state for groups that are added
    KINDS["Adagrad"] = torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}, []


class Dots(nn.Module):
    """Its loss has just the gradients that are asked for; a parameter not named has none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, seed: int, use: frozenset[int]) -> Tensor | None:
        terms = [
            (self.all[number] * gradient(seed, number)).sum()
            for number in sorted(use)
            if self.all[number].requires_grad
        ]
        return torch.stack(terms).sum() if terms else None


def gradient(seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-128, 129, SHAPES[number], generator=generator) / 64


class Start(NamedTuple):
    """What a training is: the optimizer's class, and options that change no bit of it."""

    kind: str = "AdamW"
    max_grad_norm: float | None = None
    frozen: int | None = None  # a parameter
    fields: Any = ()


class Side:
    """One rank, or (no group) plain torch, which adds up what all of ``ranks`` would have."""

    def __init__(self, start: Start, ranks: int, group: Any = None) -> None:
        self.model, self.start, self.ranks, self.group = Dots(), start, ranks, group
        make, options, _ = KINDS[start.kind]
        if start.frozen is not None:
            self.freeze(start.frozen, True)
        groups = [
            {"params": [self.model.all[number] for number in (3, 1)], "lr": 3e-3},
            {"params": []},
            {"params": [self.model.all[number] for number in (0, 2)]},
        ]
        self.optimizer: Any = make(groups, **options)
        if group is not None:
            self.optimizer = shardcast.shard(
                self.model, self.optimizer, process_group=group, param_dtype="fp32",
                fuse="eager", max_grad_norm=start.max_grad_norm, **dict(start.fields),
            )  # fmt: skip
        self.seen: list[list[Tensor]] = []
        self.frozen_when_extended: list[bool] | None = None
        self.dropped = False  # gradients of a backward, and no step since

    # -- a step -----------------------------------------------------------------------------

    def train(
        self, backwards: list[tuple[Any, ...]], zero: str, clips: tuple[tuple[str, float], ...],
        edit: str = "", by_closure: bool = False, gather: bool = False,
    ) -> None:  # fmt: skip
        def closure() -> float:
            for backward in backwards:
                self.backward(*backward)
                is_quiet = backward[2]
                if edit in COMPUTED and self.group is not None and not is_quiet:
                    self.optimizer.gather_gradients()
                for param in self.model.all:
                    if edit and param.grad is not None:
                        EDITS[edit](param)
            if gather:
                if self.group is not None:
                    self.optimizer.gather_gradients()
                groups = self.optimizer.param_groups
                grads = [param.grad for group in groups for param in group["params"]]
                self.seen.append(
                    [torch.empty(0) if grad is None else grad.clone() for grad in grads]
                )
            for clip in clips:
                self.clip(*clip)
            if self.group is None and not any(kind == "norm" for kind, _ in clips):
                self.clip("norm", self.start.max_grad_norm)
            return 1.5

        if by_closure:
            assert self.optimizer.step(closure) == 1.5
        else:
            closure()
            self.optimizer.step()
        self.dropped = False
        self.clear(zero)
        if self.group is not None:
            self.optimizer.wait_sync()
        self.seen.append([param.detach().clone() for param in self.model.parameters()])

    def backward(self, seed: int, use: tuple[frozenset[int], ...], quiet: bool, way: str) -> None:
        """Rank ``r`` uses the parameters ``use[r]``; without a loss it runs no backward."""
        plain = self.group is None
        for rank in range(self.ranks) if plain else [self.group.rank()]:
            loss = self.model(seed + rank, use[rank])
            with self.optimizer.no_sync() if quiet and not plain else contextlib.nullcontext():
                if loss is not None:
                    loss = loss / self.ranks if plain else loss
                    inputs = [self.model.all[1]] if way == "inputs" else None
                    if way == "twice":
                        loss.backward(retain_graph=True)
                    loss.backward(inputs=inputs)

    def throw_away(self, backwards: list[tuple[Any, ...]], zero: str) -> None:
        for backward in backwards:
            self.backward(*backward)
        self.clear(zero)
        self.dropped = True

    def without_gradients(self) -> None:
        """Those set by hand now are averaged: after dropped ones only if a step came between."""
        self.clear("none")
        if self.dropped and self.group is not None:
            self.optimizer.step()

    def set_by_hand(self, seed: int, use: tuple[frozenset[int], ...]) -> None:
        """Gradients that no backward brought, without those of earlier backwards."""
        self.without_gradients()
        ranks = range(self.ranks) if self.group is None else [self.group.rank()]
        for rank in ranks:
            for number in sorted(use[rank]):
                param = self.model.all[number]
                if param.requires_grad and (number not in LAST or self.frozen_when_extended):
                    grad = gradient(seed + rank, number) / len(ranks)
                    param.grad = grad if param.grad is None else param.grad + grad

    def clip(self, kind: str, limit: float | None) -> None:
        """Of plain torch the clip of exact norms, as torch's own but for its last bit."""
        if self.group is not None:
            getattr(self.optimizer, f"clip_grad_{kind}_")(limit)
            return
        if kind == "value":
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.clamp_(-limit, limit)
            return
        bounded: dict[Any, list[Tensor]] = {}  # by the place of a group that has its own bound
        for place, group in enumerate(self.optimizer.param_groups):
            own = group.get("max_grad_norm")
            grads = bounded.setdefault((limit, None) if own is None else (own, place), [])
            grads += [param.grad for param in group["params"] if param.grad is not None]
        for (norm, _), grads in bounded.items():
            if norm is not None and grads:
                total = sum(grad.double().square().sum() for grad in grads).sqrt()
                torch._foreach_mul_(grads, (norm / (total + 1e-6)).clamp(max=1.0).float())

    def clear(self, zero: str) -> None:
        if zero == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=zero == "none")

    def overflow(self, rank: int) -> None:
        """A step that one rank's gradient spoils; plain torch leaves it out."""
        self.without_gradients()
        if self.group is not None:
            self.model.all[0].grad = torch.zeros(SHAPES[0])
            if rank % self.ranks == self.group.rank():
                self.model.all[0].grad[2, 1] = torch.nan
            self.optimizer.step()
        self.clear("none")

    # -- between steps ----------------------------------------------------------------------

    def extend(self) -> None:
        if self.frozen_when_extended is None:
            added = [self.model.all[number] for number in LAST]
            self.frozen_when_extended = self.frozen()
            self.optimizer.add_param_group({"params": added, "lr": 5e-3})

    def change(self, place: int, number: int) -> None:
        group = self.optimizer.param_groups[place]
        changes = KINDS[self.start.kind][2]
        if number < len(changes):
            group.update(changes[number])
        else:
            group["lr"] *= 0.75

    def bound(self, place: int, norm: float | None) -> None:
        group = self.optimizer.param_groups[place]
        group.pop("max_grad_norm", None)
        if norm is not None:
            group["max_grad_norm"] = norm

    def write(self, number: int, seed: int) -> None:
        with torch.no_grad():
            self.model.all[number].copy_(gradient(seed, number))

    def frozen(self) -> list[bool]:
        return [not param.requires_grad for param in self.model.all]

    def freeze(self, number: int, frozen: bool) -> None:
        self.model.all[number].requires_grad_(not frozen)

    # -- from one world to the next ---------------------------------------------------------

    def save(self, way: str, folder: str) -> dict[str, Any]:
        """What :meth:`load` needs; ``way`` is ``""`` where nothing comes after."""
        state = None
        if way == "checkpoint":
            checkpoint.save(folder, self.model, self.optimizer, step=len(os.listdir(folder)))
        elif way:
            plain = way == "plain"
            state = self.optimizer.full_state_dict() if plain else self.optimizer.state_dict()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        frozen = self.frozen_when_extended, self.frozen()
        return {"way": way, "frozen": frozen, "weights": weights, "state": state}

    def load(self, saved: dict[str, Any], folder: str) -> None:
        """Into a new model and optimizer, which were frozen and extended alike."""
        for frozen in saved["frozen"]:
            for number, is_frozen in enumerate(frozen or ()):
                self.freeze(number, is_frozen)
            if frozen and self.frozen_when_extended is None and saved["frozen"][0]:
                self.extend()
        if saved["way"] == "checkpoint":
            checkpoint.load(folder, self.model, self.optimizer)
        else:
            self.model.load_state_dict(saved["weights"])
            self.optimizer.load_state_dict(saved["state"])


def halve_in_place(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace_by_half(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def give_other_memory(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * 0.5


EDITS = {"in place": halve_in_place, "replaced": replace_by_half, "memory": give_other_memory}
COMPUTED = "replaced", "memory"  # of what is read, which a mean has to be gathered for
Action = tuple[Callable[..., None], tuple[Any, ...]]
uses = st.frozensets(st.sampled_from(NUMBERS), max_size=len(SHAPES))
per_rank = st.tuples(uses, uses, uses, uses)
shared = uses.map(lambda numbers: (numbers | {1},) * 4)  # every rank runs a backward
several = st.lists(st.integers(0, 50), min_size=1, max_size=3)
zeros = st.sampled_from(["none", "zeros", "model"])
edits = st.sampled_from(["", "", *EDITS])
clips = st.sampled_from(
    [(), (), (("norm", 0.5),), (("value", 0.25),), (("value", 0.5), ("norm", 2.0))]
)
hows = st.tuples(zeros, clips, edits, st.booleans(), st.booleans())
places, sizes = st.sampled_from([0, 2]), st.sampled_from([1, 2, 4])


class Interleavings(RuleBasedStateMachine):
    """Collects what to do, and plays it on plain torch and in strict worlds at the end."""

    partition, grads = "even", "full"

    def __init__(self) -> None:
        super().__init__()
        self.start, self.size, self.actions = Start(), 1, []
        self.dropped = False  # gradients of a backward, and no step since
        self.worlds: list[tuple[int, list[Action], str]] = []

    @initialize(
        size=sizes, kind=st.sampled_from(sorted(KINDS)), norm=st.sampled_from([None, 1.0]),
        frozen=st.sampled_from([None, None, 0, 3]), packs=st.sampled_from([1, 2, None]),
        overlap=st.booleans(),
    )  # fmt: skip
    def begin(
        self, size: int, kind: str, norm: float | None, frozen: int | None, packs: Any,
        overlap: bool,
    ) -> None:  # fmt: skip
        fields = {
            "partition": self.partition, "grads": self.grads, "pack_params": packs,
            "overlap_sync": overlap, "max_skipped_steps": 1000,
        }  # fmt: skip
        self.start, self.size = Start(kind, norm, frozen, fields), size

    def act(self, method: Callable[..., None], *args: Any) -> None:
        self.actions.append((method, args))

    @rule(seeds=several, use=per_rank, how=hows)
    def quiet_backwards_and_a_step(self, seeds: list[int], use: Any, how: Any) -> None:
        if self.grads == "sharded":  # every backward is collective
            use = (use[0] | {1},) * 4
        self.train([(seed, use, True, "") for seed in seeds], how)

    @rule(seeds=several, use=shared, way=st.sampled_from(["", "inputs", "twice"]), how=hows)
    def synchronised_backwards_and_a_step(
        self, seeds: list[int], use: Any, way: str, how: Any
    ) -> None:
        self.train([(seed, use, False, way) for seed in seeds], how)

    @rule(seed=st.integers(0, 50), use=per_rank, how=hows)
    def a_synchronised_backward_of_some_ranks_and_a_step(
        self, seed: int, use: Any, how: Any
    ) -> None:
        """Others have no batch, or nothing in it that is trained; theirs are zeros.

        Not after a dropped backward, where their step takes that for the one it is to wait for, nor
        where they edit gradients, which come to them in the step only. DDP hangs in any case.
        """
        if self.dropped or how[2]:
            use = tuple(numbers | {1} for numbers in use)
        if self.grads != "sharded":  # every backward is collective
            self.train([(seed, use, False, "")], how)

    def train(self, backwards: list[tuple[Any, ...]], how: tuple[Any, ...]) -> None:
        zero, clips, edit, by_closure, gather = how
        if self.grads == "sharded":  # there is no .grad
            edit, gather = "", False
        self.act(Side.train, backwards, zero, clips, edit, by_closure, gather)
        self.dropped = False

    @rule(seed=st.integers(0, 50), use=per_rank, zero=zeros, clips=clips)
    def gradients_by_hand_and_a_step(self, seed: int, use: Any, zero: str, clips: Any) -> None:
        self.act(Side.set_by_hand, seed, use)
        self.act(Side.train, [], zero, clips)

    @rule(seeds=several, use=shared, quiet=st.booleans(), zero=zeros)
    def throw_backwards_away(self, seeds: list[int], use: Any, quiet: bool, zero: str) -> None:
        self.act(Side.throw_away, [(seed, use, quiet, "") for seed in seeds], zero)
        self.dropped = True

    @rule(number=st.sampled_from([n for n in NUMBERS if n != 1]), frozen=st.booleans())
    def freeze_or_unfreeze(self, number: int, frozen: bool) -> None:
        self.act(Side.freeze, number, frozen)

    @rule()
    def add_a_group(self) -> None:
        """Without gradients of before, which a step refuses where ranks have others of them."""
        self.act(Side.clear, "model")
        self.act(Side.extend)

    @rule(place=places, number=st.integers(0, 5))
    def change_an_option(self, place: int, number: int) -> None:
        self.act(Side.change, place, number)

    @rule(place=places, norm=st.sampled_from([None, 0.25, 2.0]))
    def bound_a_group(self, place: int, norm: float | None) -> None:
        self.act(Side.bound, place, norm)

    @rule(number=st.sampled_from(NUMBERS), seed=st.integers(0, 50))
    def write_a_weight(self, number: int, seed: int) -> None:
        self.act(Side.write, number, seed)

    @rule(rank=st.integers(0, 3))
    def skip_a_step(self, rank: int) -> None:
        self.act(Side.overflow, rank)

    @rule(way=st.sampled_from(["local", "plain", "checkpoint"]), size=sizes)
    def go_on_in_another_world(self, way: str, size: int) -> None:
        self.act(Side.clear, "model")  # of those in no group too, which another model has not
        self.worlds.append((self.size, self.actions, way))
        self.size, self.actions = self.size if way == "local" else size, []

    def teardown(self) -> None:
        self.worlds.append((self.size, self.actions, ""))
        plain, saved = Side(self.start, self.size), []
        with tempfile.TemporaryDirectory() as folder:
            for size, actions, way in self.worlds:
                plain.ranks, plain.seen = size, []
                play(plain, actions)
                world = ThreadedWorld(size)
                results = world.run(self.on_rank, actions, saved, way, folder)
                assert_same_sequence(world.logs)
                for seen, _ in results:
                    assert_equal(seen, plain.seen)
                saved = [mine for _, mine in results] if way == "local" else [results[0][1]] * 4

    def on_rank(
        self, group: Any, actions: list[Action], saved: list[Any], way: str, folder: str
    ) -> tuple[list[list[Tensor]], dict[str, Any]]:
        side = Side(self.start, group.size(), group)
        if saved:
            side.load(saved[group.rank()], folder)
        play(side, actions)
        return side.seen, side.save(way, folder)


def assert_equal(seen: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for step, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
        for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(left, right), (step, number)


def play(side: Side, actions: list[Action]) -> None:
    for method, args in actions:
        method(side, *args)


def run_machine(partition: str, examples: int, *, grads: str = "full", shrink: bool = True) -> None:
    machine = type("Machine", (Interleavings,), {"partition": partition, "grads": grads})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None, phases=phases,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.filterwarnings(
    "ignore:step skipped", "ignore:gradients were", "ignore:state_dict. this"
)
@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_random_interleavings_with_backwards_equal_plain_torch_to_the_bit(
    partition: str, grads: str
):
    run_machine(partition, 40, grads=grads)
