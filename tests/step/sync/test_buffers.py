"""Buffers that forwards write are rank 0's after every step; all others cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import shardcast
from shardcast.testing import SpawnedWorld, ThreadedWorld, assert_same_sequence, threaded_world

pytestmark = pytest.mark.timeout(60)


class Net(nn.Module):
    """BatchNorm, a mask, frequencies, and a centre that is assigned anew where it is written."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.register_buffer("frequencies", torch.arange(8.0), persistent=False)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor, writes: bool = False, through_data: bool = False) -> Tensor:
        y = self.norm(self.linear(x))
        if writes and through_data:
            self.centre.data.mul_(0.5).add_(y.detach().mean(0))
        elif writes:
            self.centre = 0.5 * self.centre + y.detach().mean(0)
        return y


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + rank)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(group: Any, steps: int, writes: Any = (), norm: bool = True, **fields: Any) -> Any:
    """The model after so many steps; ``writes`` says (rank, step) where the centre is written."""
    model = Net(norm)
    fields = {"param_dtype": torch.float32, **fields}
    optimizer = shardcast.shard(model, sgd(model), process_group=group, **fields)
    for step in range(steps):
        call = (group.rank(), step) in writes
        model(batch(group.rank(), step), call).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def outputs(group: Any, ddp: bool, **fields: Any) -> Tensor:
    torch.set_num_threads(1)
    if not ddp:
        return trained(group, 4, **fields).eval()(batch(7)).detach()
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    for step in range(4):
        model(batch(group.rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()(batch(7)).detach()


def test_ranks_with_batch_norm_evaluate_alike_after_training_and_as_under_ddp(gloo: SpawnedWorld):
    (first, second), (expected, _) = gloo.run(outputs, False), gloo.run(outputs, True)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_buffers_that_nobody_writes_are_never_sent():
    def collectives(group: Any, broadcast_buffers: bool) -> list[int]:
        model = Net(norm=False)
        fields = {"param_dtype": torch.float32, "broadcast_buffers": broadcast_buffers}
        optimizer = shardcast.shard(model, sgd(model), process_group=group, **fields)
        model.load_state_dict(model.state_dict())  # writes the mask, once
        sent = []
        for step in range(9):
            before = len(group.log)
            model(batch(group.rank(), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(len(group.log) - before)
        return sent

    on, off = (threaded_world(2, collectives, value)[0] for value in (True, False))
    more = [step for step, (a, b) in enumerate(zip(on, off, strict=True)) if a > b]
    assert more == [0, 1, 3, 7], "when ranks compare what they have written"


@pytest.mark.parametrize("cast_buffers", [False, True])
def test_a_buffer_that_one_rank_alone_writes_is_agreed_on_in_the_next_meeting(cast_buffers: bool):
    world = ThreadedWorld(3)
    fields = {"param_dtype": torch.bfloat16} if cast_buffers else {}
    writes = {(0, 4), (1, 4), (1, 8), (2, 8)}
    centres = world.run(
        lambda group: trained(group, 9, writes, False, cast_buffers=cast_buffers, **fields).centre
    )
    assert_same_sequence(world.logs)
    assert centres[0].abs().sum() > 0
    assert all(torch.equal(centre, centres[0]) for centre in centres[1:])
    sent = [call for call in world.logs[1] if call.op == "broadcast" and call.dtype == torch.uint8]
    assert [call.shape for call in sent] == [(centres[0].nbytes,)] * 2, "in the 8th step, the 9th"


def test_a_buffer_that_is_written_through_data_is_sent_too():
    def centre(group: Any) -> Tensor:
        model = Net(norm=False)
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        for step in range(2):
            output = model(batch(group.rank(), step), writes=True, through_data=True)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.centre

    first, second = threaded_world(2, centre)
    assert first.abs().sum() > 0
    assert torch.equal(first, second)


def test_a_buffer_of_another_shape_on_one_rank_is_named_and_desynchronises_nothing():
    def run(group: Any) -> Tensor:
        model = Net()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        for step in range(9):
            if step in (2, 6):
                model.centre = torch.ones(4)
            if step == 5 and group.rank():
                model.norm.running_mean = torch.zeros(9)  # until step 6 nobody knows
            if step == 6 and group.rank():
                model.centre = torch.ones(7)
                model.norm.running_mean = torch.zeros(4)
            x = batch(group.rank(), step)
            model.linear(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.centre

    world = ThreadedWorld(2)
    with pytest.warns(UserWarning, match=r"broadcast_buffers: 'centre' changes in training"):
        first, second = world.run(run)
    assert_same_sequence(world.logs)
    assert (first.shape, second.shape) == ((4,), (7,))


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is in beta or goes
@pytest.mark.parametrize(
    "make",
    [Tensor.to_sparse, Tensor.to_sparse_csr,
     lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)],
    ids=["sparse", "compressed", "quantised"],
)  # fmt: skip
def test_sparse_and_quantised_buffers_become_rank_zeros(make: Any):
    def run(group: Any) -> Tensor:
        model = nn.Linear(3, 3)
        model.register_buffer("adjacency", make((1.0 + group.rank()) * torch.eye(3)))
        optimizer = shardcast.shard(model, sgd(model), process_group=group)
        for step in range(3):
            model(batch(0, step)[:, :3].bfloat16()).float().sum().backward()
            optimizer.step()
        return model.adjacency

    for adjacency in threaded_world(2, run):
        dense = adjacency.dequantize() if adjacency.is_quantized else adjacency.to_dense()
        assert adjacency.layout == make(torch.eye(3)).layout and torch.equal(dense, torch.eye(3))


def test_buffers_are_equal_along_the_data_parallel_dimension_of_a_mesh_alone():
    def run(mesh: DeviceMesh) -> Tensor:
        torch.manual_seed(0)
        model = Net(norm=False)
        optimizer = shardcast.shard(model, sgd(model), mesh=mesh, param_dtype="fp32")
        for _ in range(2):
            model(batch(0)).square().mean().backward()  # the same, as tensor-parallel ranks have
            model.centre.fill_(1.0 + mesh.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        return model.centre[0]

    assert [int(value) for value in threaded_world({"dp": 2, "tp": 2}, run)] == [1, 2, 1, 2]
