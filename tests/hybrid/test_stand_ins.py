"""The ``.grad`` of a DTensor is also a stand-in; every rank edits its own elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bag import Bag
from models import on_each_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcast
from shardcast.testing import threaded_world

GRID = {"dp": 2, "tp": 2}
SHAPE = (6, 5)
PLACES = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def numbers(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def backward(mesh: DeviceMesh) -> tuple[Bag, shardcast.ShardedOptimizer]:
    """Run a backward in which data-parallel rank ``r`` has the gradient ``numbers(r)``."""
    model = Bag(**dict.fromkeys(PLACES, SHAPE), plain=(3,))
    model.place(mesh["tp"], **PLACES)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = shardcast.shard(model, sgd, mesh=mesh, dp="dp", param_dtype="fp32", pack_params=3)
    whole = numbers(mesh.get_local_rank("dp"))
    part = mesh.get_local_rank("tp")
    grads = {
        name: whole.tensor_split(2, place.dim)[part] if isinstance(place, Shard) else whole
        for name, place in PLACES.items()
    }
    model({**grads, "plain": torch.ones(3)}).backward()
    return model, optimizer


def mean() -> Tensor:
    return (numbers(0) + numbers(1)) / 2


def like(param: nn.Parameter, values: Tensor) -> Tensor:
    """Return ``values`` with the parameter's placements."""
    assert isinstance(param, DTensor)
    return distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)


@on_each_rank({"dp": 1, "tp": 2})
def test_a_copy_that_another_rank_sends_stays_as_the_script_keeps_it(mesh: DeviceMesh):
    model = Bag(copies=SHAPE)
    model.place(mesh["tp"], copies=Replicate())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = shardcast.shard(model, sgd, mesh=mesh, dp="dp", param_dtype="fp32")
    kept = model.copies.grad = like(model.copies, numbers(0)).clone()
    optimizer.step()
    assert torch.equal(kept.to_local(), numbers(0))
    assert torch.equal(model.copies.to_local(), -numbers(0))


def assigned_in_place(param: Any) -> None:
    param.grad *= 3


def through_data(param: Any) -> None:
    param.grad.data.mul_(3)


def by_foreach(param: Any) -> None:
    plain = torch.ones(2)
    torch._foreach_mul_([plain, param.grad], 3.0)
    assert plain.tolist() == [3, 3]


EDITS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "a number": (lambda param: param.grad.mul_(0.5), lambda grad: grad * 0.5),
    "an assignment": (assigned_in_place, lambda grad: grad * 3),
    "a clamp": (lambda param: param.grad.clamp_(-0.2, 0.1), lambda grad: grad.clamp(-0.2, 0.1)),
    "another DTensor": (
        lambda param: param.grad.add_(like(param, numbers(7)), alpha=2),
        lambda grad: grad + 2 * numbers(7),
    ),
    "a mask": (
        lambda param: param.grad.masked_fill_(like(param, numbers(8) > 0), 0.0),
        lambda grad: grad.masked_fill(numbers(8) > 0, 0.0),
    ),
    "itself": (lambda param: param.grad.mul_(param.grad), lambda grad: grad * grad),
    "data": (through_data, lambda grad: grad * 3),
    "foreach": (by_foreach, lambda grad: grad * 3),
    "what lies here": (lambda param: param.grad.to_local().mul_(3), lambda grad: grad * 3),
    "zeros": (lambda param: param.grad.zero_(), torch.zeros_like),
}


@pytest.mark.parametrize("how", EDITS)
def test_every_rank_edits_its_own_elements_of_a_dtensor(how: str) -> None:
    edit, expected = EDITS[how]

    def script(mesh: DeviceMesh) -> None:
        model, optimizer = backward(mesh)
        for name in PLACES:
            edit(model.get_parameter(name))
        optimizer.gather_gradients()
        for name in PLACES:
            grad = model.get_parameter(name).grad
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(grad.full_tensor(), expected(mean()), msg=f"{name}, {how}")

    threaded_world(GRID, script)


READS: dict[str, Callable[[Any], Any]] = {
    "a norm of rows": lambda param: param.grad.norm(dim=1),
    "a product": lambda param: param.grad * 2,
    "a sum with another": lambda param: like(param, numbers(3)) + param.grad,
    "an item": lambda param: param.grad[0],
    "all of it": lambda param: param.grad.full_tensor() * 1,
    "what lies here": lambda param: param.grad.to_local().sum(),
    "a clone": lambda param: param.grad.clone(),
    "an operand": lambda param: param.grad.add_(torch.ones(SHAPE)),
    "another placement": lambda param: param.grad.add_(
        distribute_tensor(
            numbers(3),
            param.device_mesh,
            [Shard(1 - getattr(param.placements[0], "dim", 1))],
            src_data_rank=None,
        )
    ),
}


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@on_each_rank(GRID)
def test_a_norm_of_a_dtensor_is_that_of_all_of_it(mesh: DeviceMesh, p: float) -> None:
    model, optimizer = backward(mesh)
    for name in PLACES:
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(grad.norm(p), mean().norm(p))
        assert torch.equal(grad.double().norm(p), grad.norm(p).double())
        here = distribute_tensor(mean(), mesh["tp"], grad.placements, src_data_rank=None)
        torch.testing.assert_close(grad.to_local().norm(p), here.to_local().norm(p))
        assert torch.equal(grad.detach().to_local().half().norm(p), grad.to_local().norm(p).half())
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=p)
    every = torch.cat([*[mean().flatten()] * len(PLACES), torch.ones(3)])
    torch.testing.assert_close(total, every.norm(p))
    optimizer.gather_gradients()
    for name in PLACES:
        clipped: Any = model.get_parameter(name).grad
        torch.testing.assert_close(clipped.full_tensor(), mean() * (0.5 / total))


@on_each_rank(GRID)
def test_reads_are_refused_on_every_rank_and_metadata_are_those_of_the_dtensor(
    mesh: DeviceMesh,
) -> None:
    model, _ = backward(mesh)
    for name, place in PLACES.items():
        for how, read in READS.items():
            with pytest.raises(RuntimeError, match=rf"\.grad of '{name}'"):
                pytest.fail(f"{how}: {read(model.get_parameter(name))}")
        param = model.get_parameter(name)
        grad: Any = param.grad
        assert isinstance(grad, DTensor)
        assert grad.shape == SHAPE
        assert grad.dtype == torch.float32
        assert grad.placements == (place,)
        assert grad.device_mesh == param.device_mesh
        assert torch.zeros_like(grad).full_tensor().tolist() == torch.zeros(SHAPE).tolist()
        assert f"<.grad of '{name}'" in repr(grad) == str(grad) == f"{grad}"
        assert grad.double().dtype == torch.float64


@on_each_rank(GRID)
def test_a_gradient_that_came_as_a_part_of_the_sum_is_edited_as_all_of_it(mesh: DeviceMesh) -> None:
    model = Bag(copies=SHAPE)
    model.place(mesh["tp"], copies=Replicate())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = shardcast.shard(model, sgd, mesh=mesh, dp="dp", param_dtype="fp32")
    rank = 2 * mesh.get_local_rank("dp") + mesh.get_local_rank("tp")
    model({"copies": numbers(rank)}, partial=["copies"]).backward()
    param: Any = model.copies
    assert param.grad.placements == (Partial(),)
    param.grad.clamp_(-0.5, 0.5).add_(like(param, numbers(7)))
    optimizer.gather_gradients()
    mean = (numbers(0) + numbers(1) + numbers(2) + numbers(3)) / 2
    expected = mean.clamp(-0.5, 0.5) + numbers(7)
    torch.testing.assert_close(param.grad.full_tensor(), expected)


@on_each_rank(GRID)
def test_code_that_asks_nobody_sees_nan_also_after_gradients_were_zeroed(mesh: DeviceMesh) -> None:
    model, optimizer = backward(mesh)
    for zero in (model.zero_grad, optimizer.zero_grad):
        zero(set_to_none=False)
        (model.get_parameter("rows").to_local().sum() + model.plain.sum()).backward()
        for param in (model.get_parameter("rows"), model.plain):
            grad: Any = param.grad
            with torch._C.DisableTorchFunctionSubclass():
                assert getattr(grad, "_local_tensor", grad).isnan().all()
    optimizer.gather_gradients()
    assert model.plain.grad.tolist() == [1, 1, 1]
    assert model.get_parameter("rows").grad.full_tensor().eq(1).all()


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_edit_of_a_whole_gradient_after_the_clip_is_decided_on_again(ranks: int) -> None:
    """A DTensor's version counter is separate from that of its local tensor."""

    def script(mesh: DeviceMesh) -> None:
        model, optimizer = backward(mesh)
        optimizer.clip_grad_norm_(1.0)
        optimizer.gather_gradients()
        before = model.get_parameter("rows").to_local().clone()
        model.get_parameter("rows").grad.mul_(math.nan)
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert torch.equal(model.get_parameter("rows").to_local(), before)

    threaded_world({"dp": ranks, "tp": 2}, script)
