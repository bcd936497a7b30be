"""Changes since a version: a reader that applies them has bitwise the trained weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from models import assert_same_bits, run_world
from pairwise import thinned
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcast
from shardcast import publish
from shardcast.estimate import estimate
from shardcast.optimizer.sharded import packed_of
from shardcast.publish import Changes
from shardcast.testing import ThreadedWorld

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

Values = dict[str, Tensor]
Told = list[tuple[Changes, Values]]


class Net(nn.Module):
    """Matrices that suit every form, sizes that no alignment divides, a tie, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.odd, self.norm = nn.Linear(7, 13), nn.LayerNorm(33)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.tied = nn.Linear(7, 13, bias=False)
        self.tied.weight = self.odd.weight
        nn.init.zeros_(self.odd.bias)


LATER = "odd.bias", "scale"  # are added later, in their own group


def build(kind: str) -> tuple[Net, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    named = {name: param for name, param in model.named_parameters() if name not in LATER}
    for name, param in model.named_parameters():
        param.requires_grad_(name not in LATER)
    if kind == "Muon":
        matrices = [param for param in named.values() if param.dim() == 2 and param.numel()]
        rest = [param for param in named.values() if param.dim() != 2 or not param.numel()]
        return model, [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    return model, getattr(torch.optim, kind)(named.values(), lr=1e-3)


def weights(model: nn.Module) -> Values:
    """Return copies of all whole parameters, tied ones under each name."""
    return {
        name: getattr(param.detach(), "full_tensor", param.detach)().clone()
        for name, param in model.named_parameters(remove_duplicate=False)
    }


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill in small random values, the same on every rank."""
    for number, param in enumerate(model.parameters()):
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
        param.copy_(noise / 16)


class Story:
    """A run that a reader follows: its rank's changes and the weights at each point."""

    def __init__(self, group: Any, kind: str, fields: Mapping[str, Any]) -> None:
        self.model, optimizer = build(kind)
        self.optimizer: Any = shardcast.shard(
            self.model, optimizer, process_group=group, changes=True, **fields
        )
        self.kept: Any = None  # a saved state
        self.told: Told = []
        self.extended = False

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        every = [*self.model.named_parameters()]
        return [(n, p) for n, p in every if p.numel() and (self.extended or n not in LATER)]

    def step(self, seed: int, share: float = 1.0, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for number, (_, param) in enumerate(self.trained):
            grad = torch.randn(param.shape, generator=generator) * size
            if random.Random(seed + number).random() < share:
                param.grad = grad.to(param.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def edit(self, seed: int, how: str = "copy_") -> None:
        """Write some elements, the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for _, param in self.trained[seed % 3 :: 3]:
            values = param.detach().clone()
            chosen = torch.rand(values.shape, generator=generator) < 0.05
            values[chosen] = torch.randn(values.shape, generator=generator).to(values)[chosen]
            if how == "data":
                param.data = values
            elif how == "data_copy":
                param.data.copy_(values)
            else:
                param.copy_(values)

    def load(self, seed: int) -> None:
        """Load the model with some tensors in fp32 and some from an earlier state."""
        generator = torch.Generator().manual_seed(seed)
        state = self.model.state_dict()
        for number, (name, value) in enumerate([*state.items()]):
            if number % 3 == seed % 3:
                noise = torch.randn(value.shape, generator=generator)
                state[name] = value.float() + noise * 2.0**-10
            elif number % 3 == (seed + 1) % 3 and self.kept is not None:
                state[name] = self.kept[0][name]
        self.model.load_state_dict(state)

    def keep(self) -> None:
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.kept = model, self.optimizer.state_dict(), self.extended

    def restore(self) -> None:
        if self.kept is not None and self.kept[2] == self.extended:
            self.optimizer.load_state_dict(self.kept[1])

    def extend(self) -> None:
        if self.extended:
            return
        self.extended = True
        group = [p for n, p in self.model.named_parameters() if n in LATER]
        for param in group:
            param.requires_grad_()
        self.optimizer.optimizers[-1].add_param_group({"params": group})

    def average(self) -> None:
        if self.optimizer.config.averages:
            with self.optimizer.averaged("ema"):
                pass

    def tell(self, lost: bool = False) -> None:
        """Ask for changes like a sender; with ``lost``, as if the last answer did not arrive."""
        since = self.told[-1][0].version if self.told else None
        if lost:
            since = "00000000-00000000-0"
        self.optimizer.wait_sync()
        trained, named = {param for _, param in self.trained}, self.model.named_parameters
        names = {name for name, param in named(remove_duplicate=False) if param in trained}
        there = {name: value for name, value in weights(self.model).items() if name in names}
        self.told.append((self.optimizer.changes(since=since), there))


ACTS: dict[str, Callable[[Story, int], None]] = {
    "step": lambda story, seed: story.step(seed),
    "small step": lambda story, seed: story.step(seed, size=1e-6),
    "absent": lambda story, seed: story.step(seed, share=0.5),
    "skipped": lambda story, seed: story.step(seed, size=float("nan")),
    "copy_": lambda story, seed: story.edit(seed),
    "data": lambda story, seed: story.edit(seed, "data"),
    "data_copy": lambda story, seed: story.edit(seed, "data_copy"),
    "load": lambda story, seed: story.load(seed),
    "keep": lambda story, seed: story.keep(),
    "restore": lambda story, seed: story.restore(),
    "extend": lambda story, seed: story.extend(),
    "average": lambda story, seed: story.average(),
    "digest": lambda story, seed: story.optimizer.digest(),
    "tell": lambda story, seed: story.tell(),
    "lost": lambda story, seed: story.tell(lost=True),
}


def drawn(seed: int, length: int) -> list[str]:
    draw = random.Random(seed)
    usual = [*ACTS] + ["step"] * 6 + ["tell"] * 8 + ["copy_", "data_copy", "load"] * 2
    return ["tell", *(draw.choice(usual) for _ in range(length)), "tell"]


def follow(ranks: Sequence[Told]) -> Values:
    """Apply all ranks' changes point by point; return the reader's weights."""
    reader: Values = {}
    version = None
    for parts in zip(*ranks, strict=True):
        expected = parts[0][1]
        for _, other in parts:
            assert_same_bits(expected, other)
        version = publish.apply(reader, [changes for changes, _ in parts], version)
        assert_same_bits(reader, expected)
    return reader


def live(group: Any, kind: str, fields: Mapping[str, Any], acts: Sequence[str]) -> Told:
    story = Story(group, kind, fields)
    for seed, act in enumerate(acts):
        ACTS[act](story, seed)
    return story.told


BF16 = {"autocast": False}
TRAININGS = {
    "bf16": ("AdamW", {}),
    "averages and metrics": ("AdamW", {"averages": {"ema": 0.5}, "metrics": 2}),
    "fp16": ("Adam", {"param_dtype": "fp16", "loss_scale": 1.0}),
    "fp32": ("SGD", {"param_dtype": "fp32"}),
    "norms in fp32": ("AdamW", {"keep_fp32": "norms"}),
    "short rows": ("AdamW", {"alignment": 16, "moments": "bf16"}),
    "offload": ("AdamW", {"offload": True}),
    "split16": ("AdamW", {"master": "split16", "moments": "int8"}),
    "any class": ("NAdam", {"averages": {"ema": 0.5}}),
    "Muon": ("Muon", {"averages": {"ema": 0.5}, "metrics": 2}),
    "mxfp8": ("AdamW", {"published": {"mxfp8": ["first", "second"]}, "averages": {"ema": 0.5}}),
    "mxfp4 with Muon": ("Muon", {"published": {"mxfp4": ["first", "second"]}}),
    "overlap": ("AdamW", {"overlap_sync": True}),
}


# Each training runs with two of the world sizes 1 to 4.
DRAWN = [
    (1 + (n + more) % 4, form) for n, form in enumerate(TRAININGS) for more in (n // 4, n // 4 + 2)
]


@pytest.mark.parametrize(("ranks", "form"), thinned(2, DRAWN))
def test_a_reader_of_changes_has_the_bits_of_the_training(ranks: int, form: str):
    kind, fields = TRAININGS[form]
    number = [*TRAININGS].index(form)
    fuse = {} if number % 2 else {"fuse": "eager"}
    story = drawn(1000 * ranks + number, 30)
    stories, _ = run_world(ranks, live, kind, {**BF16, **fuse, **fields}, story)
    follow(stories)


def test_values_of_an_answer_that_failed_are_in_the_next_one():
    """After an error in a later pack, changes of earlier packs have not been sent."""
    story = Story(None, "AdamW", {**BF16, "pack_params": 1})
    story.tell()
    story.step(1)
    fails = mock.Mock(side_effect=[*range(1, 4), MemoryError])
    with mock.patch("shardcast.serving.changes.in_32_bits", fails), pytest.raises(MemoryError):
        story.tell()
    assert fails.call_count == 4
    story.tell()
    follow([story.told])


@pytest.mark.parametrize("form", ["bf16", "split16", "mxfp8", "fp32", "norms in fp32", "any class"])
def test_the_option_costs_a_copy_of_each_owned_element_and_changes_no_training(form: str):
    """This holds whether or not changes are requested."""
    kind, fields = TRAININGS[form]

    def run(group: Any) -> tuple[int, int, int]:
        reports, digests, kept = [], [], 0
        for asks in (False, True):
            model, optimizer = build(kind)
            options = {"process_group": group, "fuse": "eager", **BF16, **fields, "changes": asks}
            sharded: Any = shardcast.shard(model, optimizer, **options)
            for step in range(4):
                for number, param in enumerate(model.parameters()):
                    param.grad = torch.full_like(param, 0.01 * (number + step))
                sharded.step()
                if asks and step:
                    sharded.changes()
                elif not step:
                    reports.append(sharded.memory_report())
            digests.append(sharded.digest())
        assert digests[0] == digests[1]
        for shard in packed_of(sharded).shards:
            kept += shard.pack.own.numel * shard.pack.layout.dtype.itemsize
        before, after = reports
        assert {**before, "masters": 0} == {**after, "masters": 0}
        return after["masters"] - before["masters"], kept, after["masters"]

    results, _ = run_world(2, run)
    assert all(found == expected for found, expected, _ in results)
    model, optimizer = build(kind)
    found = estimate(model, optimizer, 2, {**BF16, **fields, "changes": True}, backend="gloo")
    assert found.masters == max(masters for _, _, masters in results)


def test_on_a_mesh_places_are_those_of_whole_parameters():
    """Covers tensor parallelism by rows and by columns, and copies on pairs of ranks."""

    def run(mesh: Any) -> Told:
        model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape) / 64 + number)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        sharded: Any = shardcast.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh=mesh, changes=True, **BF16
        )
        told, version = list[Any](), None
        for step in range(4):
            changes = sharded.changes(since=version)
            version = changes.version
            told.append((changes, weights(model)))
            inputs = torch.randn(5, 16, generator=torch.Generator().manual_seed(step))
            model(inputs).float().square().mean().backward()
            sharded.step()
            sharded.zero_grad()
        return told

    stories = ThreadedWorld({"dp": 2, "tp": 2}).run(run)
    reader = follow(stories)
    at_first = sum(story[0][0].numel for story in stories)
    assert at_first == sum(value.numel() for value in reader.values())


@pytest.mark.parametrize("as_dtensor", [False, True])
def test_experts_of_one_name_are_refused_unless_they_have_places_in_one_parameter(as_dtensor: bool):
    """Ranks of ``ep`` have different experts; only a DTensor shows their place in the whole."""

    def run(mesh: Any) -> tuple[Changes, Values] | None:
        generator = torch.Generator().manual_seed(mesh.get_local_rank("ep"))
        experts = torch.randn(2, 8, 8, generator=generator)
        placed = DTensor.from_local(experts, mesh["ep"], [Shard(0)]) if as_dtensor else experts
        model = nn.ParameterDict(
            {"experts": nn.Parameter(placed), "router": nn.Parameter(torch.zeros(8))}
        )
        optimizer = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"mesh": mesh, "dp": ("ep", "edp"), "changes": True, **BF16}
        if not as_dtensor:
            with pytest.raises(ValueError, match="'experts' is a plain parameter of an expert"):
                shardcast.shard(model, optimizer, experts={"edp": ["experts"]}, **options)
            assert model["router"].dtype == torch.float32, "nothing was converted"
            return None
        sharded: Any = shardcast.shard(model, optimizer, experts={"edp": ["experts"]}, **options)
        return sharded.changes(), weights(model)

    results = ThreadedWorld({"ep": 2, "edp": 2}).run(run)
    if as_dtensor:
        reader: Values = {}
        publish.apply(reader, [changes for changes, _ in results])
        for _, values in results:
            assert_same_bits(reader, values)


def test_of_runs_of_ranks_with_equal_masters_one_tells():
    story = ["tell", "step", "tell", "copy_", "small step", "tell"]
    stories = ThreadedWorld({"dp": 4}).run(
        lambda _mesh: live(None, "AdamW", {**BF16, "shard_ranks": 2}, story)
    )
    follow(stories)
    for parts in zip(*stories, strict=True):
        assert sorted(changes.numel > 0 for changes, _ in parts) == [False, False, True, True]


def test_a_rank_that_owns_no_block_tells_nothing():
    """Two blocks have two owners, although all ranks share their pack."""

    def run(group: Any) -> list[Changes]:
        model = nn.Linear(128, 256, bias=False)
        sharded: Any = shardcast.shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            process_group=group,
            published={"fp8_block128": "*"},
            changes=True,
            **BF16,
        )
        answers = [sharded.changes()]
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            sharded.step()
            answers.append(sharded.changes(answers[-1].version))
        return answers

    results, _ = run_world(3, run)
    reader: Values = {}
    version = None
    for parts in zip(*results, strict=True):
        version = publish.apply(reader, parts, version)
        assert sum(part.numel > 0 for part in parts) == 2
