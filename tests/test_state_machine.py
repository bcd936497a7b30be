"""Random interleavings of what users do to an optimizer, against plain torch, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import mlp
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(300)
LAYERS = (0, 2, 4)

# What one turn does; "gradients" sets those of the layers given, on the ranks given.
turns = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 99), st.sets(st.sampled_from(LAYERS))),
        st.tuples(st.just("overflow"), st.integers(0, 2), st.sampled_from(LAYERS)),
        st.tuples(st.just("partial"), st.integers(0, 99), st.sampled_from(LAYERS)),
        st.tuples(st.just("freeze"), st.sampled_from(LAYERS), st.booleans()),
        st.tuples(st.just("rate"), st.sampled_from([1e-3, 1e-2, 0.1]), st.none()),
        st.tuples(st.just("group"), st.none(), st.none()),
        st.tuples(st.just("accumulate"), st.integers(0, 99), st.integers(2, 3)),
    ),
    min_size=3,
    max_size=12,
)
Turn = tuple[str, Any, Any]


def fresh(seed: int, param: Tensor) -> Tensor:
    """Gradients on a grid of 1/64: sums over ranks and micro-batches are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 129, param.shape, generator=generator) / 64


def add_gradients(model: nn.Sequential, seed: int, layers: set[int], share: float = 1.0) -> None:
    for layer in LAYERS:
        for number, param in enumerate(model[layer].parameters()):
            if layer in layers and param.requires_grad:
                grad = fresh(seed * 10 + layer + number, param) * share
                param.grad = grad if param.grad is None else param.grad + grad


def play(
    model: nn.Sequential, optimizer: Any, script: list[Turn], rank: int, size: int,
    snapshot: Callable[[], None],
) -> None:  # fmt: skip
    """One rank's part of the script; ``size`` 0 is plain torch, which sees the mean."""
    grouped = False
    for kind, a, b in script:
        if kind == "step":
            add_gradients(model, a, b)
        elif kind == "overflow" and size:
            add_gradients(model, 1, {b})
            if rank == a % size and model[b].weight.requires_grad:
                model[b].weight.grad[0, 0] = torch.inf
        elif kind == "partial":  # one rank alone has a gradient: the others count as zero
            if rank == 0:
                add_gradients(model, a, {b}, share=1.0 if size else 1 / max(1, WORLD[0]))
        elif kind == "accumulate":
            for micro in range(b):
                add_gradients(model, a + micro, set(LAYERS))
        elif kind == "freeze":
            model[a].requires_grad_(not b)
        elif kind == "rate":
            for group in optimizer.param_groups:
                group["lr"] = a
        elif kind == "group" and not grouped:
            grouped = True
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 3e-3})
        skipped = kind == "overflow" and (size == 0 or not model[b].weight.requires_grad)
        if kind in ("step", "partial", "accumulate") or (kind == "overflow" and not skipped):
            optimizer.step()
        optimizer.zero_grad()
        snapshot()


WORLD = [1]  # size of the world that the oracle stands for


def run(script: list[Turn], size: int, partition: str) -> None:
    WORLD[0] = size
    expected: list[list[Tensor]] = []
    oracle = mlp()
    plain = torch.optim.AdamW([*oracle[0].parameters(), *oracle[2].parameters()], lr=1e-2)

    def keep(model: nn.Module, into: list[list[Tensor]]) -> Callable[[], None]:
        return lambda: into.append([param.detach().clone() for param in model.parameters()])

    play(oracle, plain, copy.deepcopy(script), 0, 0, keep(oracle, expected))

    def one(group: Any) -> list[list[Tensor]]:
        model, seen = mlp(), []
        inner = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-2)
        optimizer = shardcast.shard(
            model, inner, process_group=group, param_dtype="fp32", pack_params=2,
            partition=partition, max_skipped_steps=100,
        )  # fmt: skip
        play(model, optimizer, copy.deepcopy(script), group.rank(), size, keep(model, seen))
        return seen

    world = ThreadedWorld(size)
    results = world.run(one)
    assert_same_sequence(world.logs)
    for seen in results:
        for turn, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            for left, right in zip(mine, theirs, strict=True):
                assert torch.equal(left, right), (turn, script[turn])


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("partition", ["even", "whole"])
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(script=turns, size=st.sampled_from([1, 2, 4]))
def test_random_interleavings_equal_plain_torch_after_every_turn(
    script: list[Turn], size: int, partition: str
):
    run(script, size, partition)


def test_a_skip_that_is_no_skip_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: with the flag ignored, one overflow ends in other parameters."""
    from shardcast.scaler import Scaler

    combine = Scaler.combine

    def never(self: Scaler, *args: Any) -> Any:
        verdict = combine(self, *args)
        verdict.skip.zero_()
        return verdict

    script: list[Turn] = [("step", 1, {0, 2}), ("overflow", 0, 0), ("step", 2, {0})]
    with pytest.warns(UserWarning, match="step skipped"):
        run(script, 2, "even")
    monkeypatch.setattr(Scaler, "combine", never)
    with pytest.raises(AssertionError):
        run(script, 2, "even")
