"""Sync during the next forward: results are bitwise those without overlap, and calls wait.

In the worlds of these tests, values are NaN until they have been waited for.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import CASES, Case, assert_same_bits, on_each_rank, parts, run_world, sharded, values
from pairwise import thinned
from torch import Tensor, nn

from shardcast import ShardedOptimizer
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import (
    BufferHazardError,
    RankLeftError,
    SpawnedWorld,
    ThreadedWorld,
)

X = torch.linspace(-1, 1, 8).view(2, 4)
SMALL = {"pack_params": 2, "alignment": 8, "sync": "broadcast"}


class Body(nn.Sequential):
    """A sequence with its own forward, since torch's would not be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Net(nn.Module):
    """A parameter of the root, and nested layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = Body(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x * self.scale))


class Branches(nn.Module):
    """Weights used without a call of their module: a tied one, and one of a layer never called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.aside = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.aside.weight, self.aside.bias) + self.inner(x)
        x = x + self.attention(x, x, x)[0]
        return self.last(F.linear(F.linear(x, self.words.weight), self.words.weight.t()))


class Fused(Net):
    """Evaluates on another path, which reads its layers' weights, like TransformerEncoderLayer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            return super().forward(x)
        return F.linear(x, self.last.weight)


class Ways(nn.Module):
    """Its ``way`` differs between ranks."""

    way = 0

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ways[self.way](x)
        return F.linear(x, self.ways[1].weight) if self.way == 2 else x


def normed() -> Net:
    """Register weight_norm's hooks, which compute weights, before those of sync."""
    net = Net()
    for layer in (net.layers[0], net.last):
        torch.nn.utils.weight_norm(layer)
    return net


def floats(width_in: int, width_out: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, width_in), torch.randn(size, width_out))


MODELS = {
    **CASES,
    "net": Case(Net, floats(4, 3)),
    "branches": Case(Branches, floats(4, 3)),
    "fused": Case(Fused, floats(4, 3)),
    "weight_norm": Case(normed, floats(4, 3)),
    "ways": Case(Ways, floats(4, 4)),
    "batch_norm": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), floats(4, 4)),
}


class Run:
    """Training on one rank; a script may return tensors to compare."""

    def __init__(self, group: Any, name: str, path: Path, overlap: bool, **fields: Any) -> None:
        self.case, self.path, self.overlap = MODELS[SCRIPTS[name].model], path, overlap
        self.model: Any = self.case.build()
        self.optimizer: Any = sharded(
            self.model, group, overlap_sync=overlap, **{**SMALL, **SCRIPTS[name].fields, **fields}
        )
        self.rank, self.count = packed_of(self.optimizer).comm.rank, 0

    @property
    def pending(self) -> bool:
        return any(pack.pending for pack in packed_of(self.optimizer).sync.packs)

    def backward(self, model: Any = None, scale: float = 1.0) -> Tensor:
        self.count += 1
        batch = self.case.batch(10 * self.count + self.rank)
        loss = self.case.loss(self.model if model is None else model, batch) * scale
        loss.backward()
        return loss.detach()

    def step(self, model: Any = None, scale: float = 1.0) -> None:
        self.backward(model, scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        """Make steps, after each of which a sync is in flight."""
        for _ in range(count):
            self.step()
            assert self.pending == self.overlap


Script = Callable[[Run], Any]


class Named(NamedTuple):
    script: Script
    model: str = "net"
    fields: dict[str, Any] = {}  # noqa: RUF012, never modified


def tensors(value: Any, name: str = "") -> dict[Any, Tensor]:
    """Return copies of all tensors inside."""
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    found: dict[Any, Tensor] = {}
    for key, item in inside:
        found.update(tensors(item, f"{name}/{key}"))
    return found


def played(group: Any, name: str, path: Path, overlap: bool, fields: dict[str, Any]) -> Any:
    """Make two steps and run the script; return what it read, parameters, and this rank's state."""
    torch.set_num_threads(1)
    run = Run(group, name, path / str(overlap), overlap, **fields)
    run.steps(2)
    seen = tensors(SCRIPTS[name].script(run))
    run.optimizer.close()
    return {**seen, **values(run.model), **parts(run.optimizer)}


# -- reads and writes of parameters after a step --------------------------------------------------


def reads(read: Callable[[Any, ShardedOptimizer], Any]) -> Named:
    return Named(lambda run: read(run.model, run.optimizer))


def then_steps(act: Script) -> Named:
    def script(run: Run) -> None:
        act(run)
        for _ in range(2):
            run.step()

    return Named(script)


def unpickled(model: nn.Module, _optimizer: Any) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=False).named_parameters())


@torch.no_grad()
def mapped(model: nn.Module, _optimizer: Any) -> Tensor:
    params = {name: param.detach() for name, param in model.named_parameters()}
    return torch.func.functional_call(model, params, (X,))


def by_hand(model: nn.Module, optimizer: ShardedOptimizer) -> Any:
    optimizer.wait_sync()
    return list(model.parameters())


READERS: dict[str, Named] = {
    "state_dict": reads(lambda model, _: model.state_dict()),
    "state_dict of a part": reads(lambda model, _: model.layers[2].state_dict()),
    "a forward": reads(lambda model, _: model(X)),
    "an evaluation": reads(lambda model, _: torch.no_grad()(model.eval())(X)),
    "a part alone": reads(lambda model, _: model.layers(X)),
    "a leaf alone": reads(lambda model, _: model.last(X)),
    "functional_call": reads(mapped),
    "a copy": reads(lambda model, _: dict(copy.deepcopy(model).named_parameters())),
    "a pickle": reads(unpickled),
    # With all-gather the own part is in flight too; a broadcast only reads it.
    "state_dict of the optimizer": reads(lambda _, optimizer: optimizer.state_dict()),
    "full_parameters": reads(lambda _, optimizer: optimizer.full_parameters()),
    "wait_sync": reads(by_hand),
}


def load(run: Run) -> None:
    run.model.load_state_dict(run.case.build(5).state_dict())


def load_a_part(run: Run) -> None:
    run.model.layers[0].load_state_dict(run.case.build(5).layers[0].state_dict())


def report(run: Run) -> None:
    before = run.optimizer.memory_report()
    run.optimizer.wait_sync()
    assert before == run.optimizer.memory_report()


def two_forwards(run: Run) -> None:
    (run.model(X).square().mean() + run.model(X + 1).square().mean()).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def no_forward(run: Run) -> None:
    """The update must wait for broadcasts that read what it writes."""
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    run.optimizer.step()
    run.optimizer.zero_grad()


def parts_strung_together(run: Run) -> None:
    """Calls of other parts do not show what must wait, so the step after them waits itself."""

    def front(x: Tensor) -> Tensor:
        return run.model.last(run.model.layers(x * run.model.scale))

    def reads_first(x: Tensor) -> Tensor:
        return front(x + run.model.last.weight.mean())

    for model in (front, reads_first, reads_first, run.model, front, reads_first):
        run.step(model)


ACTS = [load, load_a_part, report, two_forwards, no_forward, parts_strung_together]
EDITS = {act.__name__: then_steps(act) for act in ACTS}


@pytest.mark.parametrize(
    ("name", "kind"),
    thinned(2, [*READERS, *EDITS], ("fp32", "split")),
)
def test_readers_and_edits_find_what_they_would_without_overlap(
    name: str, kind: str, tmp_path: Path
):
    split = {"param_dtype": "bf16", "master": "split16", "sync": "all_gather"}
    assert_as_without(name, tmp_path, **(split if kind == "split" else {}))


def assert_as_without(name: str, path: Path, world: Any = None, **fields: Any):
    def run(overlap: bool) -> Any:
        if world is not None:
            return world.run(played, name, path, overlap, fields)
        return run_world(2, played, name, path, overlap, fields)[0]

    for mine, theirs in zip(run(False), run(True), strict=True):
        assert_same_bits(mine, theirs)


# -- options and models ---------------------------------------------------------------------------


def trains(run: Run) -> list[Tensor]:
    """Run steps of two backwards, and evaluations; only forwards wait."""
    seen = []
    for step in range(2):
        seen.append(run.backward())
        run.steps(1)
        if step == 0:
            run.model.eval()
            with torch.no_grad():
                seen.append(run.model(run.case.batch(7)[0]))
            run.model.train()
    return seen


def other_ways(run: Run) -> None:
    """Launches must not depend on the forwards, nor on which ranks wait."""
    for step in range(6):
        run.model.way = step * (1 + run.rank) % 3
        run.step()
        if step % 2 == run.rank:
            run.model.state_dict()


def without_a_batch(run: Run) -> None:
    """The rank without a forward cannot overlap, but must launch the same collectives."""
    for step in range(3):
        if step != 1 or run.rank == 0:
            run.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def compiled(run: Run, part: bool) -> list[Tensor]:
    """Run eager and compiled steps, with evaluations through the graph between them."""
    torch._dynamo.reset()
    front = run.model
    if part:
        run.model.layers.compile(backend="eager", fullgraph=True)
    else:
        front = torch.compile(run.model, backend="eager", fullgraph=True)
    seen = []
    for _ in range(2):
        seen.append(front(X.to(run.model.scale.dtype)))
        run.step()
        with torch.no_grad():
            seen.append(front(X.to(run.model.scale.dtype)))
        run.step(front)
    return seen


BF16 = {"param_dtype": "bf16"}
SPLIT = {**BF16, "master": "split16"}
TRAINED: dict[str, Named] = {
    "split masters, all_gather": Named(trains, "gpt", {**SPLIT, "sync": "all_gather"}),
    "checkpointed": Named(trains, "gpt_nonreentrant", BF16),
    "checkpointed re-entrantly": Named(trains, "gpt_reentrant", BF16),
    "tied, checkpointed": Named(trains, "tied_reentrant", BF16),
    "scalars of the root": Named(trains, "scalars", BF16),
    "weights that another module reads": Named(trains, "branches", {"pack_params": 1}),
    "weights that only an evaluation reads": Named(trains, "fused"),
    "weights that a hook computes": Named(trains, "weight_norm"),
    "buffers": Named(trains, "batch_norm"),
    "other ways on each rank": Named(other_ways, "ways", {"pack_params": 1}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_has_the_bits_of_the_one_without_overlap(name: str, tmp_path: Path):
    assert_as_without(name, tmp_path)


ON_GLOO: dict[str, Named] = {
    "broadcast": Named(trains, "gpt", BF16),
    "gather": Named(trains, "gpt", {**BF16, "sync": "all_gather"}),
    "a rank without a batch": Named(without_a_batch),  # on gloo, a plain sync makes other calls
    "compiled root": Named(partial(compiled, part=False), fields=BF16),
    "compiled part": Named(partial(compiled, part=True), fields=BF16),
}
SCRIPTS = {**READERS, **EDITS, **TRAINED, **ON_GLOO}


@pytest.mark.parametrize("name", ON_GLOO)
def test_real_processes_have_the_bits_of_those_without_overlap(
    name: str, gloo: SpawnedWorld, tmp_path: Path
):
    assert_as_without(name, tmp_path, gloo)


def compiled_part(group: Any, raises: bool) -> tuple[list[str], list[Tensor]]:
    """Return what steps of a compiled part warn of, perhaps as an error, and the weights then."""
    torch._dynamo.reset()
    model, optimizer = started(group, steps=2)
    model.layers.compile(backend="eager", fullgraph=True)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if raises:
            warnings.filterwarnings("error", "overlap_sync")
        for _ in range(1 if raises else 3):
            model(X).square().mean().backward()
            try:
                optimizer.step()
            except UserWarning as error:
                told.append(str(error))
            optimizer.zero_grad()
    told += [text for it in caught if (text := str(it.message)).startswith("overlap_sync")]
    return told, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_a_compiled_part_is_told_of_once_by_a_rank_that_has_the_new_weights(
    gloo: SpawnedWorld, raises: bool
):
    found = gloo.run(compiled_part, raises)
    (told,) = [text for texts, _ in found for text in texts]
    assert "has no effect, because a part of the model was compiled" in told
    for _, weights in found:
        assert all(map(torch.equal, weights, found[0][1]))


# -- overlap and waits ----------------------------------------------------------------------------


def started(group: Any, steps: int = 1, **fields: Any) -> tuple[Net, ShardedOptimizer]:
    """Return model and optimizer after ``steps`` steps, with the last sync in flight."""
    model = MODELS["net"].build()
    optimizer = sharded(model, group, **{"pack_params": 1, "overlap_sync": True, **fields})
    for _ in range(steps):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def pending(optimizer: ShardedOptimizer) -> list[str]:
    """Return the first parameter of each pack in flight."""
    return [pack.layout.slots[0].name for pack in packed_of(optimizer).sync.packs if pack.pending]


def test_a_module_begins_while_the_packs_of_later_ones_are_on_their_way():
    last = ["last.weight", "last.bias"]
    second = ["layers.2.weight", "layers.2.bias", *last]
    first = ["layers.0.weight", "layers.0.bias", *second]

    def run(group: Any) -> None:
        model, optimizer = started(group, steps=3)
        assert pending(optimizer) == first, "step() waits for the root's own parameters"
        seen = {}
        for name in ("layers.0", "layers.2", "last"):
            model.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: seen.update({name: pending(optimizer)})
            )
        model(X)
        assert seen == {"layers.0": second, "layers.2": last, "last": []}

    _, world = run_world(2, run)
    syncs = world.logs[0][-7:]
    assert [call.op for call in syncs] == ["all_gather_single"] * 7
    assert all(call.async_op for call in syncs)


@pytest.mark.parametrize("by", [{0, 1}, {1}], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "gather_gradients"])
@on_each_rank(2)
def test_a_forward_that_reads_past_a_call_it_always_made_is_an_error_on_all_ranks(
    group: Any, call: str, by: set[int]
):
    """It is not raised inside the backward, where the other ranks would hang."""
    model, optimizer = started(group)
    reads_past = group.rank() in by
    out = F.linear(model.layers(X), model.last.weight) if reads_past else model(X)
    before = {name: p.detach().clone() for name, p in model.layers.named_parameters()}
    out.sum().backward()
    with pytest.raises(RuntimeError, match=r"last\.weight.*wait_sync"):
        getattr(optimizer, call)(*[1.0] * (call == "clip_grad_norm_"))
    optimizer.wait_sync()
    for name, param in model.layers.named_parameters():
        assert torch.equal(param, before[name]), name
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()  # training continues
    optimizer.wait_sync()
    assert not all(map(torch.equal, model.layers.parameters(), before.values()))


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank("size")
def test_nothing_is_hooked_after_close_or_without_a_second_rank_or_the_option(
    group: Any, size: int
):
    for overlap in (True, False):
        model, optimizer = started(group, overlap_sync=overlap)
        if size > 1 and overlap:
            optimizer.close()
        assert not pending(optimizer)
        for layer in (model.layers, model.last):
            assert not layer._forward_pre_hooks and not layer._state_dict_pre_hooks
        optimizer.wait_sync()


def test_a_lost_rank_is_an_error_where_its_values_are_waited_for():
    told: list[str] = []

    def run(group: Any, last: int | None) -> None:
        if last is not None and group.rank() == 0:
            send, sent = group.broadcast, list[Any]()

            def lost(*args: Any) -> Any:
                if len(group.log) == last:
                    for work in sent:
                        work.is_completed()  # lets rank 1 continue
                    raise ConnectionError("rank 0 is lost")
                sent.append(send(*args))
                return sent[-1]

            group.broadcast = lost
        model, _ = started(group, sync="broadcast")
        if last is not None and group.rank() == 1:  # it has launched everything by now
            with pytest.raises(RankLeftError):
                model(X)
            told.append("forward")

    world = ThreadedWorld(2)
    with pytest.raises(BufferHazardError):  # without a wait at the end; only counts the collectives
        world.run(run, None)
    with pytest.raises(ConnectionError):  # from rank 0, in the last broadcast of that step
        world.run(run, len(world.logs[0]) - 1)
    assert told == ["forward"]
