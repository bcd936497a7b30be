"""``p.grad = x`` between backwards: what a script assigns is trained, as under DDP.

Gradients are multiples of 1/64, so that sums and means of 1, 2 and 4 ranks are exact in fp32, and
those of 3 ranks are compared within the rounding of their division.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from pairwise import seeds
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.memory.gradients import Gradients
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(120)
SHAPES = ((5, 3), (7,), (2, 9), (11,))
Act = tuple[str, int, Any]  # what, seed, and which parameters


class Dots(nn.Module):
    """The gradient of each parameter is the number that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, seed: int, use: Any) -> Tensor:
        return sum((self.all[n] * gradient(seed, n)).sum() for n in use)


def gradient(seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-128, 129, SHAPES[number], generator=generator) / 64


def drawn(draw: random.Random) -> list[list[Act]]:
    """A few steps; each ends with a backward that is synchronised, and most assign before it."""
    steps, seed = [], 0
    for _ in range(3):
        acts: list[Act] = []
        for _ in range(draw.randint(3, 6)):
            seed += 10
            kind = draw.choice(["sync", "quiet", "assign"])
            some = sorted(draw.sample(range(len(SHAPES)), draw.randint(1, len(SHAPES))))
            if kind == "quiet" and any(act[0] == "sync" for act in acts):
                kind = "sync"  # refused: see test_reduce
            acts.append((kind, seed, some if kind == "assign" else [*range(len(SHAPES))]))
        if acts[0][0] == "assign":  # set by hand after a clear, which has a rule of its own
            acts.insert(0, (draw.choice(["sync", "quiet"]), seed + 5, [*range(len(SHAPES))]))
        seed += 10
        acts.append(("sync", seed, [*range(len(SHAPES))]))
        acts.append((draw.choice(["none", "zeros", "keep"]), 0, ()))
        steps.append(acts)
    return steps


def ddp(steps: list[list[Act]], size: int) -> list[Tensor]:
    """What DDP's ranks would train: plain torch, the gradients of every rank in lists."""
    model = Dots()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads: list[list[Any]] = [[None] * len(SHAPES) for _ in range(size)]
    for acts in steps:
        for kind, seed, use in acts:
            for rank in range(size):
                for n in use:
                    new = gradient(seed + rank, n)
                    added = kind != "assign" and grads[rank][n] is not None
                    grads[rank][n] = grads[rank][n] + new if added else new
            if kind == "sync":
                for n in range(len(SHAPES)):
                    total = torch.stack([mine[n].double() for mine in grads]).sum(0)
                    for rank in range(size):
                        grads[rank][n] = (total / size).float()
            if kind in ("none", "zeros", "keep"):
                for n, param in enumerate(model.all):
                    param.grad = grads[0][n]
                optimizer.step()
                if kind != "keep":
                    grads = [[None] * len(SHAPES) for _ in range(size)]
    return [param.detach().clone() for param in model.all]


def trained(group: Any, steps: list[list[Act]], fields: dict[str, Any]) -> list[Tensor]:
    model = Dots()
    if "mesh" in fields:
        fields = {**fields, "mesh": group}
    optimizer = shardcast.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        process_group=None if isinstance(group, DeviceMesh) else group,
        param_dtype="fp32",
        fuse="eager",
        **fields,
    )
    rank = group.get_rank() if isinstance(group, DeviceMesh) else group.rank()
    for acts in steps:
        for kind, seed, use in acts:
            seed += rank
            if kind == "assign":
                for n in use:
                    model.all[n].grad = gradient(seed, n)
            elif kind in ("sync", "quiet"):
                with optimizer.no_sync() if kind == "quiet" else contextlib.nullcontext():
                    model(seed, use).backward()
            else:
                optimizer.step()
                if kind != "keep":
                    optimizer.zero_grad(set_to_none=kind == "none")
    return [param.detach().clone() for param in model.all]


COPIES = {
    "shard_ranks": {"shard_ranks": 2},
    "replicated": {"shard_ranks": 1},
    "mesh": {"mesh": None, "dp": ("out", "in")},
}


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize(
    ("size", "copies"), [*((n, None) for n in (1, 2, 3, 4)), *((4, name) for name in COPIES)]
)
def test_what_is_assigned_between_backwards_is_trained_as_under_ddp(
    size: int, copies: str | None, accumulate: str
):
    for seed in seeds(4):
        draw = random.Random(seed)
        steps = drawn(draw)
        fields = {
            "accumulate": accumulate,
            "pack_params": draw.choice([1, 2, None]),
            "partition": draw.choice(["even", "whole"]),
            **COPIES.get(copies, {}),
        }
        axes = {"out": 2, "in": 2} if copies == "mesh" else {"dp": size}
        world = ThreadedWorld(axes if copies else size, timeout=20)
        results = world.run(trained, steps, fields)
        assert_same_sequence(world.logs)
        expected = ddp(steps, size)
        for params in results:
            for mine, right in zip(params, expected, strict=True):
                tol = {} if size == 3 else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(mine, right, **tol, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_means_that_are_kept_beside_what_is_assigned_are_missed(
    monkeypatch: pytest.MonkeyPatch, accumulate: str
):
    """Negative control."""
    monkeypatch.setattr(Gradients, "_drop", lambda *_: None)
    with pytest.raises(AssertionError, match="not equal"):
        test_what_is_assigned_between_backwards_is_trained_as_under_ddp(2, None, accumulate)


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_raise_for_what_one_assigned_alone_or_to_another_parameter(
    size: int, accumulate: str
):
    def run(group: Any, others: int | None) -> None:
        model = Dots()
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            process_group=group,
            accumulate=accumulate,
        )
        model(0, range(4)).backward()
        if accumulate == "sharded":
            with optimizer.no_sync():
                model(5, range(4)).backward()
        number = 2 if group.rank() == 1 else others
        if number is not None:
            model.all[number].grad = torch.ones(SHAPES[number], dtype=model.all[0].dtype)
        model(10, range(4)).backward()
        if others == 2:
            optimizer.step()
            return
        told = r"assigned between two backwards of a step differs .*rank 1: 'all.2'"
        with pytest.raises(RuntimeError, match=told):
            optimizer.step()

    for others in (None, 1, 2):
        ThreadedWorld(size, timeout=20).run(run, others)


@pytest.mark.parametrize("by", [(0,), (3,), (0, 1, 2, 3)])
def test_all_ranks_raise_where_what_is_assigned_is_summed_over_model_parallel_ranks_too(
    by: tuple[int, ...],
):
    """Whether it is a part of that sum, or all of it, nobody can know."""

    def run(mesh: Any) -> None:
        model = Dots()
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            dp="dp",
            grad_sum_over={"tp": ["all.1"]},
            param_dtype="fp32",
        )
        for step in range(2):
            model(0, range(4)).backward()
            if step and mesh.get_rank() in by:
                model.all[1].grad = torch.ones(SHAPES[1])
            model(10, range(4)).backward()
            told = r"summed over model-parallel ranks differs .*'all.1 by rank "
            with pytest.raises(RuntimeError, match=told) if step else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    ThreadedWorld({"dp": 2, "tp": 2}, timeout=20).run(run)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_takes_the_place_of_zeros_is_no_difference_between_ranks(size: int):
    """Where one rank alone has a backward in a step, all may edit what they have."""

    def run(group: Any) -> list[Tensor]:
        model = Dots()
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            process_group=group,
            param_dtype="fp32",
            fuse="eager",
        )
        for step in range(3):
            with optimizer.no_sync():
                if group.rank() == 0:
                    model(10 * step, range(4)).backward()
            for param in model.all:
                if type(param.grad) is Tensor:  # not what is at its owners, which are zeros
                    param.grad = param.grad * 0.5
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [param.detach().clone() for param in model.all]

    model = Dots()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for n, param in enumerate(model.all):
            param.grad = gradient(10 * step, n) * 0.5 / size
        optimizer.step()
    for params in ThreadedWorld(size, timeout=20).run(run):
        for mine, right in zip(params, model.all, strict=True):
            torch.testing.assert_close(mine, right.detach())
