"""Sync beside the next forward: whoever else reads or writes parameters finds them whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Tensors, assert_same_bits, parts, run_world, sharded
from torch import Tensor, nn

import shardcast
from shardcast import checkpoint
from shardcast.testing import (
    BufferHazardError,
    Death,
    Delay,
    RankDied,
    RankLeftError,
    SpawnedWorld,
    ThreadedWorld,
    fake_world,
)

pytestmark = pytest.mark.timeout(60)

X = torch.linspace(-1, 1, 8).view(2, 4)


class Body(nn.Sequential):
    """A sequence whose forward is not torch's own, which would not be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Net(nn.Module):
    """A parameter of the root itself, and layers one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = Body(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x * self.scale))


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def train(model: nn.Module, optimizer: Any, x: Tensor = X) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(group: Any, overlap: bool, **fields: Any) -> tuple[Net, shardcast.ShardedOptimizer]:
    """After two steps; with ``overlap`` the last sync is on its way."""
    model = build()
    chosen = {"pack_params": 2, "alignment": 8, "overlap_sync": overlap, "sync": "broadcast"}
    fields = {**chosen, **fields}
    optimizer = sharded(model, group, **fields)
    for step in range(2):
        train(model, optimizer, X + step + optimizer.comm.rank)
    assert any(pack.pending for pack in optimizer.sync.packs) == overlap
    return model, optimizer


Deaf = Callable[[], AbstractContextManager[None]]


def tensors(value: Any, name: str = "") -> Tensors:
    """Copies of all tensors inside."""
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, dict):
        inside = value.items()
    else:
        inside = enumerate(value) if isinstance(value, (list, tuple)) else ()
    found: Tensors = {}
    for key, item in inside:
        found.update(tensors(item, f"{name}/{key}"))
    return found


def unpickled(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=False).named_parameters())


@torch.no_grad()
def mapped(model: Net, _optimizer: Any) -> Tensor:
    params = {name: param.detach() for name, param in model.named_parameters()}
    return torch.func.functional_call(model, params, (X,))


def by_hand(model: Net, optimizer: shardcast.ShardedOptimizer) -> Any:
    optimizer.wait_sync()
    return [p.detach() for p in model.parameters()]


READERS: dict[str, Callable[[Net, shardcast.ShardedOptimizer], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "state_dict of a part": lambda model, _: model.layers[2].state_dict(),
    "a forward": lambda model, _: model(X),
    "an evaluation": lambda model, _: torch.no_grad()(model.eval())(X),
    "a part alone": lambda model, _: model.layers(X),
    "a leaf alone": lambda model, _: model.last(X),
    "functional_call": mapped,
    "a copy": lambda model, _: dict(copy.deepcopy(model).named_parameters()),
    "a pickle": lambda model, _: unpickled(model),
    "state_dict of the optimizer": lambda _, optimizer: optimizer.state_dict(),
    "full_parameters": lambda _, optimizer: optimizer.full_parameters(),
    "wait_sync": by_hand,
}
# With all-gather the own part is on its way too; a broadcast only reads it.
OWN_PART = ("state_dict of the optimizer", "full_parameters")


def read(group: Any, reader: str, overlap: bool, sync: str) -> Tensors:
    model, optimizer = trained(group, overlap, sync=sync)
    found = tensors(READERS[reader](model, optimizer))
    optimizer.close()
    return found


@pytest.mark.parametrize("sync", ["broadcast", "all_gather"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_find_what_they_would_without_overlap(reader: str, sync: str):
    plain, _ = run_world(2, read, reader, False, sync)
    overlapped, _ = run_world(2, read, reader, True, sync)
    for mine, theirs in zip(plain, overlapped, strict=True):
        assert_same_bits(mine, theirs)
    assert plain[0]


def load(model: Net, _optimizer: Any, _path: Path) -> None:
    model.load_state_dict(build().state_dict())


def load_a_part(model: Net, _optimizer: Any, _path: Path) -> None:
    model.layers[0].load_state_dict(build().layers[0].state_dict())


def load_optimizer(_model: Net, optimizer: Any, _path: Path) -> None:
    state = optimizer.state_dict()
    state["state"] = copy.deepcopy(state["state"])
    for values in state["state"].values():
        values["master"].mul_(2)
    optimizer.load_state_dict(state)


def surgery(model: Net, optimizer: Any, _path: Path) -> None:
    optimizer.wait_sync()
    with torch.no_grad():
        model.last.weight.mul_(2)
    optimizer.resync_masters()


def add_group(model: Net, optimizer: Any, _path: Path) -> None:
    torch.manual_seed(5)
    model.layers.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(model.layers[3].parameters())})


def save_and_load(model: Net, optimizer: Any, path: Path) -> None:
    checkpoint.save(path, model, optimizer, step=2)
    for step in range(2):
        train(model, optimizer, X - step)
    checkpoint.load(path, model, optimizer)


def save(model: Net, optimizer: Any, path: Path) -> None:
    checkpoint.save(path, model, optimizer, step=2)


def clip(model: Net, optimizer: Any, _path: Path) -> None:
    model(X).square().mean().backward()
    optimizer.clip_grad_norm_(0.01)
    optimizer.step()


def skip(model: Net, optimizer: Any, _path: Path) -> None:
    model(X * torch.nan if optimizer.comm.rank == 1 else X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1


def closure(model: Net, optimizer: Any, _path: Path) -> None:
    def again() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(again).isfinite()


def report(_model: Net, optimizer: Any, _path: Path) -> None:
    before = optimizer.memory_report()
    optimizer.wait_sync()
    assert before == optimizer.memory_report()


def two_forwards(model: Net, optimizer: Any, _path: Path) -> None:
    first, second = model(X), model(X + 1)
    (first.square().mean() + second.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


ACTS = [load, load_a_part, load_optimizer, surgery, add_group, save, save_and_load, clip, skip,
        closure, report, two_forwards]  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"param_dtype": "bf16", "master": "split16", "sync": "all_gather"},
}


def go_on(group: Any, act: Callable[..., None], path: Path, overlap: bool, kind: str) -> Any:
    """Two steps, the act, two more steps; parameters, and what this rank owns."""
    model, optimizer = trained(group, overlap, **KINDS[kind])
    act(model, optimizer, path)
    for step in range(2):
        train(model, optimizer, X * (step + 2))
    optimizer.close()
    return tensors(dict(model.named_parameters())), parts(optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_training_goes_on_as_without_overlap(act: Callable[..., None], kind: str, tmp_path: Path):
    plain, _ = run_world(2, go_on, act, tmp_path / "plain", False, kind)
    overlapped, _ = run_world(2, go_on, act, tmp_path / "overlapped", True, kind)
    for (mine, own), (theirs, their_own) in zip(plain, overlapped, strict=True):
        assert_same_bits(mine, theirs)
        assert_same_bits(own, their_own)


# -- errors and other ranks ---------------------------------------------------------------------


def test_a_lost_rank_is_an_error_where_its_values_are_waited_for():
    told: list[str] = []

    def run(group: Any, dying: bool) -> int:
        model, optimizer = trained(group, True)
        train(model, optimizer)
        if dying and group.rank() == 1:  # it has launched everything by then
            with pytest.raises(RankLeftError):
                model(X)
            told.append("forward")
        return len(group.log)

    world = ThreadedWorld(2)
    with pytest.raises(BufferHazardError):  # nobody waits at the end: counts the collectives only
        world.run(run, False)
    with pytest.raises(RankDied):  # of rank 0, in its last broadcast of that step
        last = len(world.logs[0]) - 1
        world.run(run, True, faults=[Delay(0, last, 0.5), Death(0, last)])  # rank 1 goes ahead
    assert told == ["forward"]


def test_ranks_may_take_different_ways_through_the_model():
    """What is launched does not depend on the forwards."""

    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, way: int) -> Tensor:
            x = self.ways[way](x)
            return F.linear(x, self.ways[1].weight) if way == 2 else x

    def run(group: Any, overlap: bool) -> Tensors:
        torch.manual_seed(0)
        model = Ways()
        optimizer = sharded(model, group, pack_params=1, overlap_sync=overlap)
        for step in range(6):
            model(X, (step * (1 + group.rank())) % 3).square().mean().backward()
            optimizer.step()
            if step % 2 == group.rank():
                model.state_dict()  # one rank waits for all, the other one does not
            optimizer.zero_grad()
        optimizer.close()
        return tensors(dict(model.named_parameters()))

    plain, _ = run_world(2, partial(run, overlap=False))
    overlapped, _ = run_world(2, partial(run, overlap=True))
    for mine, theirs in zip(plain, overlapped, strict=True):
        assert_same_bits(mine, theirs)


def test_buffers_are_synced_too_before_the_packs():
    class Norm(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def run(group: Any) -> Tensors:
        torch.manual_seed(0)
        model = Norm()
        optimizer = sharded(model, group, overlap_sync=True)
        for _ in range(3):
            train(model, optimizer, X * (1 + group.rank()))
        last = [(call.op, call.async_op) for call in group.log[-2:]]
        packs = [("all_gather_single", True)]
        assert last == [("broadcast", False), *packs], "one message, which waits for no pack"
        return tensors(model.state_dict())

    first, second = run_world(2, run)[0]
    assert_same_bits(first, second)


# -- compiled models ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["root", "part"])
def test_compiled_models_are_whole_when_they_are_traced_and_never_overlap_again(way: str):
    torch._dynamo.reset()
    with fake_world(2) as group:
        model, optimizer = trained(group, True)
        packs = optimizer.sync.packs
        front = torch.compile(model, backend="eager", fullgraph=True) if way == "root" else model
        if way == "part":
            model.layers.compile(backend="eager", fullgraph=True)
        assert any(pack.pending for pack in packs)
        if way == "root":
            front(X)  # unlike the part's, no eager hook waits for the rest of the packs
            assert not any(pack.pending for pack in packs)
        for graph in (front, model, front):
            train(graph, optimizer)
            assert not any(pack.pending for pack in packs)
        optimizer.close()


def train_compiled(group: Any, way: str, overlap: bool) -> Tensors:
    """Two eager steps and two compiled ones, evaluated through the graph all the while."""
    torch._dynamo.reset()
    model, optimizer = trained(group, overlap, param_dtype="bf16")
    front: nn.Module = model
    if way == "root":
        front = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.layers.compile(backend="eager", fullgraph=True)
    found = {}
    for step in range(2):
        found[f"output {step}"] = front(X).detach()
        train(model, optimizer, X + step)
        with torch.no_grad():
            found[f"evaluation {step}"] = front(X)
        train(front, optimizer, X + step)
    optimizer.close()
    return {**found, **tensors(dict(model.named_parameters()))}


@pytest.mark.parametrize("way", ["root", "part"])
def test_compiled_models_train_as_without_overlap(way: str, gloo: SpawnedWorld):
    plain = gloo.run(train_compiled, way, False)
    for mine, theirs in zip(plain, gloo.run(train_compiled, way, True), strict=True):
        assert_same_bits(mine, theirs)
