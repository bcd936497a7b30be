"""Unit tests of a training loop on mock process groups: pytest examples/unit_test_mock_groups.py.

It needs no processes or ports: ranks are threads, or one process is one rank of a large world.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcast
from shardcast.testing import fake_world, threaded_world

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def mean_of_ranks(group):
    x = torch.full((4,), float(group.rank()))
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)  # <- any collective, in the mock group
    return x


def test_the_mean_of_two_ranks():
    for x in threaded_world(2, mean_of_ranks):  # <- what each rank returned
        assert torch.equal(x, torch.full((4,), 0.5))


def trained(group):
    """Train one step on a batch of this rank, and return the weights."""
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = shardcast.shard(model, sgd, process_group=group, param_dtype=torch.float32)
    model(torch.full((2, 8), float(group.rank()))).square().mean().backward()
    optimizer.step()
    return model[0].weight.detach().clone()


def test_both_ranks_have_the_same_weights_after_a_step():
    first, second = threaded_world(2, trained)
    assert torch.equal(first, second) and not torch.equal(first, build()[0].weight)


def loss_on(mesh):
    parallel = parallelize_module(build(), mesh["tp"], PLAN)
    return parallel(torch.ones(2, 8)).square().mean().item()


def test_tensor_parallel_ranks_compute_the_same_loss():
    loss = build()(torch.ones(2, 8)).square().mean().item()
    assert threaded_world({"dp": 2, "tp": 2}, loss_on) == [pytest.approx(loss)] * 4  # <- a mesh


def test_what_one_rank_of_1024_sends():
    with fake_world({"pp": 4, "dp": 32, "tp": 8}, rank=17) as mesh:  # <- this rank alone
        parallel = parallelize_module(build(), mesh["tp"], PLAN, src_data_rank=None)
        parallel(torch.ones(2, 8)).sum()
        assert parallel[0].weight.to_local().shape == (2, 8)
        log = mesh.get_group("tp").rank_log  # calls in all groups, in order
        assert [(call.group, call.op) for call in log] == [("tp", "all_reduce")]
