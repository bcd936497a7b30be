"""Ranks take rank 0's buffers before training forwards, as with DDP, and after every step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import on_each_rank, run_world
from oracle import mlp, set_grads, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.testing import SpawnedWorld, threaded_world


class Net(nn.Module):
    """BatchNorm, a mask, frequencies, and a centre that the forward may write or replace."""

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


class Scaled(nn.Module):
    """Its forward reads, records and writes two buffers, a scale and an integer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(self.scale) + int(self.calls))
        y = self.norm(self.linear(x)) * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean()  # a new tensor
            self.calls += 1 + dist.get_rank()
        return y


def unlike(group: Any, how: str, ddp: bool) -> tuple[list[float], list[Tensor]]:
    """Run a loop as for DDP; return what forwards read, and the final buffers and weights."""
    torch.set_num_threads(1)
    rank, model = group.rank(), Scaled()
    bare = model
    if ddp:
        optimizer = sgd(model)
        model = DistributedDataParallel(model)
    else:
        fields = {"accumulate": "sharded"} if how == "accumulated sharded" else {}
        optimizer = shardcast.shard(
            model, sgd(model), process_group=group, param_dtype="fp32", **fields
        )
    if how == "compiled":
        model = torch.compile(model, backend="eager")
    for step in range(3):
        if rank == 0:  # a write on one rank
            bare.scale.fill_(2.0 + step)
        micro_batches = 3 if "accumulated" in how else 1
        for number in range(micro_batches):
            held = number < micro_batches - 1
            syncing = model.no_sync() if ddp else optimizer.no_sync()
            with syncing if held else contextlib.nullcontext():
                out = model(batch(rank, step))
                if how == "twice":  # the second forward must not invalidate the first one's graph
                    out = out + model(batch(rank, step + 5))
                out.square().mean().backward()
        if how == "alone" and rank == 0:
            bare.eval()(batch(9))  # no collective in eval mode, even with gradients
            bare.train()
        optimizer.step()
        optimizer.zero_grad()
    if how == "evaluated":
        model.eval()
        with torch.no_grad():
            model(batch(7))
    state = [buffer.clone() for buffer in bare.buffers()]
    return bare.seen, state + [param.detach().float() for param in bare.parameters()]


@pytest.mark.parametrize(
    "how",
    ["plain", "accumulated", "accumulated sharded", "twice", "alone", "evaluated", "compiled"],
)
def test_forwards_read_what_they_read_under_ddp(gloo: SpawnedWorld, how: str):
    ours = gloo.run(unlike, how, False)
    try:
        theirs = gloo.run(unlike, how, True)
    except RuntimeError as error:  # torch < 2.13
        if how != "twice" or "modified by an inplace operation" not in str(error):
            raise
        pytest.skip("DDP of this torch broadcasts into what the first forward saved for backward")
    for rank in range(2):
        assert ours[rank][0] == pytest.approx(theirs[rank][0], rel=1e-6), f"of rank {rank}"
    torch.testing.assert_close(ours[0][1], theirs[0][1], rtol=1e-5, atol=1e-6)


def messages(group: Any) -> list[Any]:
    return [call for call in group.log if call.op == "broadcast" and call.dtype == torch.uint8]


@pytest.mark.parametrize("fields", [{}, {"broadcast_buffers": False}], ids=str)
@pytest.mark.parametrize("buffers", [True, False])
def test_one_message_precedes_each_forward_in_training_and_one_ends_a_step(
    buffers: bool, fields: dict[str, Any]
):
    def run(group: Any) -> list[int]:
        model = Net() if buffers else nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
        optimizer = shardcast.shard(model, sgd(model), process_group=group, **fields)
        sent = []
        for step in range(9):
            before = len(messages(group))
            model(batch(group.rank(), step)).float().square().mean().backward()
            optimizer.step()
            model.eval()(batch(0))
            with torch.no_grad():
                model.train()(batch(0))
            sent.append(len(messages(group)) - before)
        return sent

    assert threaded_world(2, run)[0] == [2 if buffers and not fields else 0] * 9


class Two(nn.ModuleDict):
    """Parts that are called separately, as in a GAN; one has no buffer."""

    def __init__(self) -> None:
        super().__init__({"g": Net(), "d": Net(), "plain": nn.Linear(4, 4)})


def test_each_called_module_sends_its_own_buffers_before_its_forward():
    def run(group: Any) -> list[tuple[int, ...]]:
        model = Two()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        model["plain"](model["g"](batch(group.rank()))).sum().backward()
        model["d"](batch(group.rank())).sum().backward()
        optimizer.step()
        return [call.shape for call in messages(group)]

    first, second, after = threaded_world(2, run)[0]
    assert first == second and after == (2 * first[0],)


def test_buffers_that_match_a_pattern_are_left_out():
    def run(group: Any) -> tuple[Tensor, Tensor]:
        model = Net()
        fields = {"param_dtype": "fp32", "broadcast_buffers": ("centre", "norm.*")}
        optimizer = shardcast.shard(model, sgd(model), process_group=group, **fields)
        model.centre.fill_(1.0 + group.rank())
        model.frequencies.fill_(1.0 + group.rank())
        model(batch(group.rank())).sum().backward()
        optimizer.step()
        return model.centre[0], model.frequencies[0]

    assert [[int(x) for x in of_rank] for of_rank in threaded_world(2, run)] == [[1, 1], [2, 1]]


@pytest.mark.parametrize("reentrant", [False, True])
@on_each_rank(2)
def test_a_checkpoint_that_computes_a_root_again_sends_nothing(group: Any, reentrant: bool):
    model = Two()
    optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
    x = batch(group.rank()).requires_grad_()
    checkpoint(model["g"], x, use_reentrant=reentrant).sum().backward()
    sent = len(messages(group))
    optimizer.step()
    # With re-entrant checkpoints the first forward runs without gradients.
    assert sent == (0 if reentrant else 1)


@pytest.mark.parametrize("cast_buffers", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_buffer_that_one_rank_alone_writes_is_equal_after_the_step(
    cast_buffers: bool, through_data: bool
):
    def run(group: Any) -> Tensor:
        model = Net(norm=False)
        fields = {"param_dtype": torch.bfloat16 if cast_buffers else torch.float32}
        optimizer = shardcast.shard(
            model, sgd(model), process_group=group, cast_buffers=cast_buffers, **fields
        )
        for step in range(3):
            model(batch(0, step), group.rank() == step, through_data).float().sum().backward()
            optimizer.step()
        return model.centre

    centres, world = run_world(3, run)
    assert centres[0].abs().sum() > 0
    assert all(torch.equal(centre, centres[0]) for centre in centres[1:])
    assert len({call.shape for call in world.logs[1] if call.dtype == torch.uint8}) == 1


@pytest.mark.parametrize("changes", [0, 1])
def test_a_buffer_of_another_shape_on_one_rank_is_named_and_desynchronises_nothing(changes: int):
    def run(group: Any) -> Tensor:
        model = Net()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        for step in range(3):
            if step == 1 and group.rank() == changes:
                model.centre = torch.ones(7)
            model(batch(group.rank(), step)).sum().backward()
            optimizer.step()
        return model.centre

    with pytest.warns(UserWarning, match="broadcast_buffers: 'centre' was") as caught:
        centres = run_world(2, run)[0]
    assert len([each for each in caught if "'centre'" in str(each.message)]) == 1
    assert torch.equal(centres[changes], torch.ones(7))
    expected = torch.full((4,), torch.nan if changes == 0 else 0.0)
    torch.testing.assert_close(centres[1 - changes], expected, equal_nan=True)


def test_a_buffer_that_comes_into_being_later_is_named():
    def run(group: Any) -> None:
        model = Net()
        model.register_buffer("later", None)
        fields = {"param_dtype": "fp32", "broadcast_buffers": "*.own"}
        optimizer = shardcast.shard(model, sgd(model), process_group=group, **fields)
        model(batch(0)).sum().backward()
        model.later = torch.ones(3)
        del model.mask, model.frequencies, model.centre  # so their number is unchanged
        model.norm.register_buffer("more", torch.ones(3))
        model.norm.register_buffer("own", torch.ones(3))
        optimizer.step()
        optimizer.step()

    with pytest.warns(UserWarning, match="broadcast_buffers: 'later', 'norm.more' did") as caught:
        threaded_world(2, run)
    assert len([each for each in caught if "'norm.more'" in str(each.message)]) == 1


@pytest.mark.filterwarnings("ignore")  # torch's own, about beta and deprecated features
@pytest.mark.parametrize(
    "make",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    ],
    ids=["sparse", "compressed", "quantised"],
)
@on_each_rank(2)
def test_sparse_and_quantised_buffers_become_rank_zeros(group: Any, make: Any):
    model = nn.Linear(3, 3)
    model.register_buffer("adjacency", make((1.0 + group.rank()) * torch.eye(3)))
    optimizer = shardcast.shard(model, sgd(model), process_group=group)
    for step in range(3):
        model(batch(0, step)[:, :3].bfloat16()).float().sum().backward()
        optimizer.step()
    adjacency = model.adjacency
    dense = adjacency.dequantize() if adjacency.is_quantized else adjacency.to_dense()
    assert adjacency.layout == make(torch.eye(3)).layout and torch.equal(dense, torch.eye(3))


def test_buffers_are_equal_along_the_data_parallel_dimension_of_a_mesh_alone():
    def run(mesh: DeviceMesh) -> Tensor:
        torch.manual_seed(0)
        model = Net(norm=False)
        optimizer = shardcast.shard(model, sgd(model), mesh=mesh, param_dtype="fp32")
        for _ in range(2):
            model(batch(0)).square().mean().backward()  # the same, as on tensor-parallel ranks
            model.centre.fill_(1.0 + mesh.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        return model.centre[0]

    assert [int(value) for value in threaded_world({"dp": 2, "tp": 2}, run)] == [1, 2, 1, 2]


def odd_buffers(group: Any) -> bool:
    model = mlp()
    kinds = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64]
    for number, kind in enumerate(kinds):
        values = torch.full((3, 2), group.rank() + 1.0).to(kind)
        model.register_buffer(f"odd{number}", values.t() if number % 2 else values)
    model.register_buffer("scalar", torch.tensor(group.rank() + 1, dtype=torch.int16))
    optimizer = shardcast.shard(model, sgd(model), process_group=group, broadcast_buffers=True)
    set_grads(model, 0)
    optimizer.step()
    return all(bool((buffer.to(torch.float32) == 1).all()) for buffer in model.buffers())


def test_buffers_of_every_dtype_become_equal(gloo: SpawnedWorld):
    assert gloo.run(odd_buffers) == [True, True]
