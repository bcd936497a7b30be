"""Random sequences of :mod:`test_reduce` in the forms of storage, layouts and optimizers there are.

The other side is plain torch in fp32. Gradients are multiples of a quarter of the number of ranks,
so that sums and means are exact in bf16, too, and masters are equal to the bit. With moments in
int8 they are not: there a mean that is lost moves a weight by a third of a step's rate or more.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from models import parts, values
from pairwise import SEED, pairwise
from test_reduce import (
    EVERY,
    SEQUENCES,
    Action,
    Fail,
    Give,
    Side,
    play,
    random_sequence,
    refused,
    told,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.testing import SpawnedWorld, ThreadedWorld, threaded_world

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*this clip is lost"),
    pytest.mark.filterwarnings("ignore:no_sync"),
]
RATE = 1e-2
SHAPES = (3,), (2, 32), (5,), (4, 32), (3, 32)
MATRICES = "layers.1.weight", "layers.3.weight", "layers.4.weight"
STORAGE: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "split16": {"param_dtype": torch.bfloat16, "master": "split16"},
    "int8": {"param_dtype": torch.bfloat16, "moments": "int8"},
}
LAYOUTS = "even", "whole", "shard_ranks", "copy along tp"
OPTIMIZERS = "AdamW", "Muon", "Adafactor"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap_sync": {"overlap_sync": True},
    "published": {"published": {"mxfp8": list(MATRICES)}},
    "asleep": {},
}


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, grad: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Partial()])
        return Give.apply(x, weight, grad)


class Layers(nn.Module):
    """The same chain, of modules."""

    def __init__(self, seed: int, mesh: Any) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=make) for shape in SHAPES]
        if mesh is not None:
            weights = [distribute_tensor(weight, mesh, [Replicate()]) for weight in weights]
        self.layers = nn.ModuleList(Layer(weight) for weight in weights)

    @property
    def all(self) -> list[Any]:
        return [layer.weight for layer in self.layers]

    def forward(
        self, x: Tensor, grads: dict[int, Tensor], fails_at: int = -1, nests: bool = False
    ) -> Tensor:
        for number, grad in grads.items():
            if number == fails_at:
                x = Fail.apply(x)
            layer = self.layers[number]
            x = checkpoint(layer, x, grad, use_reentrant=True) if nests else layer(x, grad)
        return x


class Several(list[torch.optim.Optimizer]):
    """Optimizers of plain torch that are stepped together."""

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self:
            optimizer.zero_grad(set_to_none)


def optimizers(kind: str, model: Layers) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.all if param.dim() == 2]
    if kind == "Adafactor":
        return [torch.optim.Adafactor(model.all, lr=RATE)]
    adamw = lambda params: torch.optim.AdamW(params, lr=RATE, betas=(0.5, 0.9))  # noqa: E731
    if kind == "AdamW":
        return [adamw(model.all)]
    return [
        torch.optim.Muon(matrices, lr=RATE),
        adamw([param for param in model.all if param.dim() != 2]),
    ]


class Cell(Side):
    """A side of one cell; along ``tp`` of a mesh, in place of a group, ranks have copies."""

    def __init__(
        self,
        ranks: int,
        kind: str,
        group: Any,
        mesh: Any,
        copies: int,
        rank: int = 0,
        sleeps: bool = False,
        **fields: Any,
    ) -> None:
        self.mesh, self.copies, self.rank, self.sleeps = mesh, copies, rank, sleeps
        super().__init__(ranks, kind, group, **fields)

    def model(self, seed: int) -> Layers:
        return Layers(seed, None if self.mesh is None else self.mesh["tp"])

    def optimizer(self, model: Layers, kind: str, fields: dict[str, Any]) -> Any:
        made = optimizers(kind, model)
        if self.group is None:
            return Several(made)
        where = {"process_group": self.group} if self.mesh is None else {"mesh": self.mesh}
        if "shard_ranks" in fields:
            where = {}
        return shardcast.shard(model, made, fuse="eager", **where, **fields)

    def here(self) -> list[int]:
        return super().here() if self.group is None else [self.rank]

    def gradients(self, seed: int, use: frozenset[int]) -> dict[int, Tensor]:
        make, ranks = torch.Generator().manual_seed(seed), self.ranks // self.copies
        grain = (1 if self.group is None else ranks) / 4
        every = [torch.randint(-4, 5, shape, generator=make) * grain for shape in SHAPES]
        return {number: every[number] for number in sorted(use)}

    def look(self, model: Any, optimizer: Any) -> dict[Any, Tensor]:
        if self.group is None:
            return values(model)
        optimizer.wait_sync()
        masters = {key[:3]: part for key, part in parts(optimizer).items() if key[3] == "master"}
        shown = {name: local(tensor) for name, tensor in values(model).items()}
        return {**masters, **shown}

    def rest(self, optimizer: Any) -> None:
        if self.sleeps:
            optimizer.sleep()
            optimizer.wake()


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sequences(seed: int) -> list[list[Action]]:
    first, last = (Side.backward, (1, (EVERY,) * 4)), (Side.step, ())
    usual: list[Action] = [
        first,
        last,
        (Side.clear, ("none",)),
        (Side.backward, (2, (EVERY,) * 4)),
        first,
        (Side.clip, ()),
        last,
        (Side.clear, ("zeros",)),
        first,
        last,
    ]
    return [usual, *(random_sequence(random.Random(seed + number)) for number in range(2))]


def of_cell(
    group: Any,
    size: int,
    layout: str,
    kind: str,
    sequence: list[Action],
    sleeps: bool,
    fields: dict[str, Any],
) -> Any:
    """What a rank has seen, or which action it has refused."""
    torch.set_num_threads(1)
    has_mesh = hasattr(group, "mesh_dim_names")
    rank = group.get_rank() if has_mesh else group.rank()
    mesh, copies = None, 1
    if layout == "copy along tp":
        copies = tensor_parallel(size)
        dims = "dp", "tp"
        mesh = (
            group
            if has_mesh
            else init_device_mesh("cpu", (size // copies, copies), mesh_dim_names=dims)
        )
    return told(Cell(size, kind, group, mesh, copies, rank, sleeps, **fields), sequence)


def tensor_parallel(size: int) -> int:
    return 2 if size % 2 == 0 else size


def ranks_of(
    cell: tuple[Any, ...], sequence: list[Action], world: SpawnedWorld | None, accumulate: str
) -> list[Any]:
    storage, layout, kind, way, size = cell
    fields = {**STORAGE[storage], **WAYS[way], "pack_params": 2, "accumulate": accumulate}
    if layout in ("even", "whole"):
        fields["partition"] = layout if kind == "AdamW" else "auto"
    elif layout == "shard_ranks":
        fields["shard_ranks"] = max(1, size // 2)
    arguments = size, layout, kind, sequence, way == "asleep", fields
    if world is not None:
        return world.run(of_cell, *arguments)
    if layout == "copy along tp":
        copies = tensor_parallel(size)
        return threaded_world({"dp": size // copies, "tp": copies}, of_cell, *arguments)
    if layout == "shard_ranks":
        return threaded_world({"dp": size}, of_cell, *arguments)
    return ThreadedWorld(size).run(of_cell, *arguments)


def compare(cell: tuple[Any, ...], sequence: list[Action], world: Any, accumulate: str) -> None:
    storage, layout, kind, _, size = cell
    copies = tensor_parallel(size) if layout == "copy along tp" else 1
    expected = play(Cell(size, kind, None, None, copies), sequence)
    ranks = ranks_of(cell, sequence, world, accumulate)
    maybe, surely = refused(sequence, size, accumulate)
    if surely is not None or isinstance(ranks[0], int):
        assert ranks == [ranks[0]] * size and ranks[0] in (*maybe, surely)
        return
    steps = 0
    for plain, *seen in zip(expected, *ranks, strict=True):
        if isinstance(plain, Tensor):
            for norm in seen:
                torch.testing.assert_close(norm, plain, rtol=1e-6, atol=0)
            continue
        steps += 0.5  # of each of two models
        covered = {name: torch.zeros(tensor.numel()) for name, tensor in plain.items()}
        for of_rank in seen:
            for key, tensor in of_rank.items():
                if isinstance(key, str):  # what the models show is alike
                    assert torch.equal(tensor, seen[0][key]), key
                    continue
                name, start, stop = key
                covered[name][start:stop] += 1
                error = (tensor - plain[name].flatten()[start:stop]).abs().max()
                limits = {"int8": 0.1, "Muon": 0.01}
                limit = RATE * (steps + 1) * max(limits.get(storage, 0), limits.get(kind, 0))
                assert error <= limit, (name, float(error), steps)
        assert all((count > 0).all() for count in covered.values())


def fits(storage: str, layout: str, kind: str, way: str, size: int) -> bool:
    if kind != "AdamW" and (layout == "even" or storage in ("split16", "int8")):
        return False  # these keep whole masters, and state of their own
    if size == 1 and layout in ("shard_ranks", "copy along tp"):
        return False
    return way != "published" or storage not in ("fp32", "split16")


CELLS = pairwise(STORAGE, LAYOUTS, OPTIMIZERS, WAYS, (1, 2, 3, 4), fits=fits)


def seed_of(cell: tuple[Any, ...]) -> int:
    return 1_000_003 * SEED + CELLS.index(cell)


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_cell_of_the_matrix_equals_plain_torch(cell: tuple[Any, ...], accumulate: str):
    for sequence in sequences(seed_of(cell)):
        compare(cell, sequence, None, accumulate)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[-1] == 2], ids=str)
def test_two_processes_equal_plain_torch(cell: tuple[Any, ...], gloo: SpawnedWorld):
    usual, other, _ = sequences(seed_of(cell))
    compare(cell, usual, gloo, "sharded")
    compare(cell, other, gloo, "local")


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[-1] == 4], ids=str)
def test_four_processes_equal_plain_torch(cell: tuple[Any, ...], four: SpawnedWorld):
    compare(cell, sequences(seed_of(cell))[1], four, "local")


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("layout", ["shard_ranks", "copy along tp"])
def test_sequences_equal_plain_torch_where_ranks_hold_all_means(layout: str, name: str):
    compare(("bf16", layout, "AdamW", "plain", 2), SEQUENCES[name], None, "local")
