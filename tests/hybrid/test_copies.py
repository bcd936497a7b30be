"""What several ranks hold stays the same on all of them, bit for bit, through skipped steps too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

STEPS, SKIPPED = 40, (16, 17, 30)
GRID = {"pp": 2, "dp": 2, "tp": 2}
TIED = [("embed", "head")]


def stage(mesh: DeviceMesh) -> Bag:
    """One of two stages; what is plain begins different on every rank."""
    here = mesh.get_local_rank("pp")
    own, weight = ("early", "embed") if here == 0 else ("late", "head")
    model = Bag(**{weight: (5, 8), own: (7, 3), "copy": (9,), "plain": (4, 3)})
    for param in model.parameters():
        torch.nn.init.normal_(param)
    model.place(mesh["tp"], **{weight: Shard(0), own: Shard(1), "copy": Replicate()})
    return model


def gradients(model: Bag, step: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Random ones; for plain parameters the same on tensor-parallel ranks, else all different."""
    row = dist.get_process_group_ranks(mesh.get_group("tp"))[0]
    found = {}
    for name, param in model.named_parameters():
        source = row if name == "plain" else dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * step + source)
        shape = param.to_local().shape if hasattr(param, "to_local") else param.shape
        found[name] = torch.randn(shape, generator=generator)
    if step in SKIPPED and dist.get_rank() == step % 8:
        next(iter(found.values())).fill_(float("inf"))
    return found


def local(param: Any) -> Tensor:
    return (param.to_local() if hasattr(param, "to_local") else param).detach().clone()


def train(
    mesh: DeviceMesh, tied: list[Any], steps: int
) -> tuple[list[dict[str, Tensor]], Any, int]:
    """Parameters after each step, masters of this rank at the end, and how many were skipped."""
    model = stage(mesh)
    optimizer = shardcast.shard(
        [model], torch.optim.AdamW(model.parameters(), lr=0.01), mesh=mesh, tied=tied
    )
    seen = []
    for step in range(steps):
        model(gradients(model, step, mesh), partial=["copy"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: local(param) for name, param in model.named_parameters()})
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    masters = {names[index]: entry["master"] for index, entry in state.items()}
    return seen, masters, optimizer.skipped_steps


def alike(results: list[Any], ranks: tuple[int, int], names: tuple[str, str]) -> bool:
    """Whether two ranks' tensors have the same bits after every step, masters included."""
    (ours, mine, _), (theirs, yours, _) = (results[rank] for rank in ranks)
    one, other = names
    steps = zip(ours, theirs, strict=True)
    same = all(torch.equal(a[one].view(torch.int16), b[other].view(torch.int16)) for a, b in steps)
    held = one in mine, other in yours
    return same and held[0] == held[1] and (not held[0] or torch.equal(mine[one], yours[other]))


def test_copies_stay_equal_on_all_ranks_through_40_steps_of_which_some_are_skipped():
    results = threaded_world(GRID, train, TIED, STEPS)
    for first in range(0, 8, 2):  # and its tensor-parallel neighbour
        assert alike(results, (first, first + 1), ("copy", "copy"))
        assert alike(results, (first, first + 1), ("plain", "plain"))
        own = "early" if first < 4 else "late"
        assert not alike(results, (first, first + 1), (own, own)), "these are parts"
    for rank in range(4):  # and the same place of the other stage
        assert alike(results, (rank, rank + 4), ("embed", "head"))
        assert not alike(results, (rank, rank + 4), ("copy", "copy")), "these are others"
    for rank in (0, 1, 4, 5):  # and its data-parallel neighbour, which owns other spans
        (ours, _, _), (theirs, _, _) = results[rank], results[rank + 2]
        for mine, yours in zip(ours, theirs, strict=True):
            assert all(torch.equal(mine[name], yours[name]) for name in mine)
    for seen, _, skipped in results:  # where one rank of one stage overflows all skip
        assert skipped == len(SKIPPED)
        for step in range(1, STEPS):
            same = [torch.equal(seen[step][name], seen[step - 1][name]) for name in seen[0]]
            assert all(same) if step in SKIPPED else not any(same)


def test_copies_that_are_not_said_to_be_tied_drift_apart():
    """Negative control."""
    results = threaded_world(GRID, train, [], 3)
    assert not alike(results, (0, 4), ("embed", "head"))
