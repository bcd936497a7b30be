"""Claims of ``test_fully_shard_state_dict.py``."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP

from claims.helpers import blocks_of, transformer
from claims.sides import claim, claims_in, whole

SHARDS = "DTensor values, because these state dicts hold whole tensors"


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_and_load(model: nn.Module) -> None:
    """Assert that state dicts share the parameters' memory, and that loading writes into it."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    addresses = {name: local(param.detach()).data_ptr() for name, param in model.named_parameters()}
    sizes = [param.size() for param in model.parameters()]
    state = model.state_dict()
    assert [param.size() for param in model.parameters()] == sizes
    assert state.keys() == addresses.keys()
    for name, value in state.items():
        if addresses[name]:
            assert local(value).data_ptr() == addresses[name]
    new = {name: value.detach().clone().fill_(42) for name, value in state.items()}
    assert all((local(param.detach()) == 1).all() for param in model.parameters())
    model.load_state_dict(new)
    for name, param in model.named_parameters():
        assert (local(param.detach()) == 42).all()
        even = not isinstance(param, DTensor) or param.size(0) % param.device_mesh.size() == 0
        if even:
            assert local(param.detach()).data_ptr() == addresses[name]


def columns_and_rows(count: int) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for index in range(count):
        plan |= {f"{index}.in_proj": ColwiseParallel(), f"{index}.out_proj": RowwiseParallel()}
    return plan


@claim(8, without=SHARDS)
def test_dp_state_dict_save_load(side: Any) -> None:
    for dim, replicas in itertools.product((2, 3, 4, 5, 16), (1, 4)):
        torch.manual_seed(42)
        inner = nn.Sequential(MLP(dim), nn.Linear(dim, dim))
        model = nn.Sequential(MLP(dim), inner, MLP(dim))
        side.shard(model, modules=list(model), replicas=replicas)
        save_and_load(model)
        before = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model(torch.randn(2, dim))
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(local(before[name]), local(after[name])) for name in before)


@claim(8, without="moving the model to another device")
def test_cached_state_dict(side: Any) -> None:
    for dim in (2, 3, 4, 5):
        torch.manual_seed(42)
        model = nn.Linear(dim, dim, bias=False)
        optimizer = side.shard(model, torch.optim.AdamW)
        state = model.state_dict()

        def is_shared(model: Any = model, state: Any = state) -> bool:
            shown = local(model.weight.detach()).untyped_storage().data_ptr()
            return local(state["weight"]).untyped_storage().data_ptr() == shown

        assert is_shared()
        torch.manual_seed(42 + dist.get_rank())
        batch = torch.rand(dim, dim)
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            assert is_shared()


@claim(8, without=SHARDS)
def test_2d_state_dict_correctness(side: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    plain = nn.Sequential(*[MLP(4) for _ in range(3)])
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], columns_and_rows(3))
    side.shard(model, modules=list(model), mesh=mesh, dp="dp")
    for value, expected in zip(
        model.state_dict().values(), plain.state_dict().values(), strict=True
    ):
        assert_close(whole(value), expected)


@claim(8, without=SHARDS)
def test_dp_tp_state_dict_save_load(side: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    for dim in (4, 6, 8, 10):
        torch.manual_seed(42)
        model = nn.Sequential(*[MLP(dim) for _ in range(3)])
        parallelize_module(model, mesh["tp"], columns_and_rows(3))
        side.shard(model, modules=list(model), mesh=mesh, dp="dp")
        save_and_load(model)


@claim(8, without=SHARDS)
def test_hsdp_tp_state_dict_save_load(side: Any) -> None:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    for dim in (4, 6, 8, 10):
        torch.manual_seed(42)
        model = nn.Sequential(*[MLP(dim) for _ in range(3)])
        parallelize_module(model, mesh["tp"], columns_and_rows(3))
        side.shard(model, modules=list(model), mesh=mesh, dp=names[:2])
        save_and_load(model)


@claim(2)
def test_rank0_offload_full_state_dict(side: Any) -> None:
    plain = transformer()
    model = copy.deepcopy(plain)
    side.shard(model, modules=blocks_of(model))
    full = {}
    for name, value in model.state_dict().items():
        gathered = whole(value)
        if dist.get_rank() == 0:
            full[name] = gathered.cpu()
    if dist.get_rank() == 0:
        expected = plain.state_dict()
        assert [*full] == [*expected]
        assert_close(full, dict(expected))


NO_OPTIMIZER = "loads weights into a meta-device model that FSDP2 sharded; there is no optimizer"
TESTS = claims_in(globals()) | {
    "test_dp_state_dict_cpu_offload": NO_OPTIMIZER,
}
