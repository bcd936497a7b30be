"""A state machine: backwards of random kinds between random changes, against plain torch.

Gradients are multiples of 1/64 and come from real backward passes, other ones on each rank, so
their sums and means (of 1, 2 or 4 ranks) are exact and parameters must be equal to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(300)
SHAPES = ((5, 3), (7,), (), (2, 9), (11,), (4, 4))
NUMBERS = range(len(SHAPES))
LAST = (4, 5)  # come with a group of their own, later
KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.25),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
}


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


class Side:
    """One rank, or (no group) plain torch, which adds up what all of ``ranks`` would have."""

    def __init__(
        self, kind: str, ranks: int, group: Any = None, grads: str = "full", **fields: Any
    ) -> None:
        self.model, self.ranks, self.group, self.grads = Dots(), ranks, group, grads
        self.optimizer: Any = KINDS[kind](
            [p for n, p in enumerate(self.model.all) if n not in LAST]
        )
        if group is not None:
            self.optimizer = shardcast.shard(
                self.model, self.optimizer, process_group=group, param_dtype="fp32",
                pack_params=2, fuse="eager", grads=grads, **fields,
            )  # fmt: skip
        self.seen: list[list[Tensor]] = []
        self.extended = False

    def backward(self, seed: int, use: tuple[frozenset[int], ...], quiet: bool) -> None:
        """Rank ``r`` uses the parameters ``use[r]``; without a loss it runs no backward."""
        if self.group is None:
            for rank in range(self.ranks):
                loss = self.model(seed + rank, use[rank])
                if loss is not None:
                    (loss / self.ranks).backward()
            return
        rank = self.group.rank()
        with self.optimizer.no_sync() if quiet else contextlib.nullcontext():
            loss = self.model(seed + rank, use[rank])
            if loss is not None:
                loss.backward()

    def set_by_hand(self, seed: int, use: tuple[frozenset[int], ...]) -> None:
        """Gradients that no backward brought, without those of earlier backwards."""
        self.clear("none")
        ranks = range(self.ranks) if self.group is None else [self.group.rank()]
        for rank in ranks:
            for number in sorted(use[rank]):
                param = self.model.all[number]
                if param.requires_grad:
                    grad = gradient(seed + rank, number) / len(ranks)
                    param.grad = grad if param.grad is None else param.grad + grad

    def step(self, zero: str) -> None:
        self.optimizer.step()
        self.clear(zero)
        self.seen.append([param.detach().clone() for param in self.model.parameters()])

    def clear(self, zero: str) -> None:
        if zero == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=zero == "none")

    def overflow(self, rank: int) -> None:
        """A step that one rank's gradient spoils; plain torch leaves it out."""
        self.clear("none")
        if self.group is not None:
            self.model.all[0].grad = torch.zeros(SHAPES[0])
            if rank % self.ranks == self.group.rank():
                self.model.all[0].grad[2, 1] = torch.nan
            self.optimizer.step()
        self.clear("none")

    def extend(self) -> None:
        if not self.extended:
            self.extended = True
            added = [self.model.all[number] for number in LAST]
            self.optimizer.add_param_group({"params": added, "lr": 3e-3})

    def scale_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def freeze(self, number: int, frozen: bool) -> None:
        self.model.all[number].requires_grad_(not frozen)


uses = st.frozensets(st.sampled_from(NUMBERS), max_size=len(SHAPES))
per_rank = st.tuples(uses, uses, uses, uses)
shared = uses.map(lambda numbers: (numbers | {1},) * 4)  # every rank runs a backward
several = st.lists(st.integers(0, 50), min_size=1, max_size=3)
zeros = st.sampled_from(["none", "zeros", "model"])


class Interleavings(RuleBasedStateMachine):
    """Collects what to do, and plays it on plain torch and in a strict world at the end."""

    partition, grads = "even", "full"

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.size, self.kind = 1, "AdamW"

    @initialize(size=st.sampled_from([1, 2, 4]), kind=st.sampled_from(sorted(KINDS)))
    def begin(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind

    @rule(seeds=several, use=per_rank, zero=zeros)
    def quiet_backwards_and_a_step(self, seeds: list[int], use: Any, zero: str) -> None:
        if self.grads == "sharded":  # every backward is collective
            use = (use[0] | {1},) * 4
        self.actions += [(Side.backward, (seed, use, True)) for seed in seeds]
        self.actions.append((Side.step, (zero,)))

    @rule(seeds=several, use=shared, zero=zeros)
    def synchronised_backwards_and_a_step(self, seeds: list[int], use: Any, zero: str) -> None:
        self.actions += [(Side.backward, (seed, use, False)) for seed in seeds]
        self.actions.append((Side.step, (zero,)))

    @rule(seed=st.integers(0, 50), use=per_rank, zero=zeros)
    def gradients_by_hand_and_a_step(self, seed: int, use: Any, zero: str) -> None:
        self.actions += [(Side.set_by_hand, (seed, use)), (Side.step, (zero,))]

    @rule(number=st.sampled_from([n for n in NUMBERS if n != 1]), frozen=st.booleans())
    def freeze_or_unfreeze(self, number: int, frozen: bool) -> None:
        self.actions.append((Side.freeze, (number, frozen)))

    @rule()
    def add_a_group(self) -> None:
        self.actions.append((Side.extend, ()))

    @rule(factor=st.sampled_from([0.5, 0.9, 1.5]))
    def change_the_rate(self, factor: float) -> None:
        self.actions.append((Side.scale_rate, (factor,)))

    @rule(rank=st.integers(0, 3))
    def skip_a_step(self, rank: int) -> None:
        self.actions.append((Side.overflow, (rank,)))

    def teardown(self) -> None:
        def play(side: Side) -> list[list[Tensor]]:
            for method, args in self.actions:
                method(side, *args)
            return side.seen

        def run(group: Any) -> list[list[Tensor]]:
            fields = {"partition": self.partition, "max_skipped_steps": 1000}
            return play(Side(self.kind, self.size, group, self.grads, **fields))

        expected = play(Side(self.kind, self.size, grads=self.grads))
        world = ThreadedWorld(self.size)
        results = world.run(run)
        assert_same_sequence(world.logs)
        for seen in results:
            for step, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
                for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
                    assert torch.equal(left, right), (step, number)


def run_machine(partition: str, examples: int, *, grads: str = "full", shrink: bool = True) -> None:
    machine = type("Machine", (Interleavings,), {"partition": partition, "grads": grads})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None, phases=phases,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_random_interleavings_with_backwards_equal_plain_torch_to_the_bit(
    partition: str, grads: str
):
    run_machine(partition, 60, grads=grads)
