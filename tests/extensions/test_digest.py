"""``digest()``: one hash of all masters and state, equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import run_world
from torch import nn

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)


def test_a_digest_sees_one_bit_of_a_master_and_of_a_moment_and_two_that_change_places():
    def run(group: Any) -> list[str]:
        model = nn.Linear(3, 5)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(-1.0, 1.0, param.numel()).view(param.shape))
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            process_group=group,
            param_dtype="fp32",
            alignment=8,
        )
        model(torch.linspace(-1.0, 1.0, 6).view(2, 3)).square().mean().backward()
        optimizer.step()
        digests = [optimizer.digest(), optimizer.digest()]
        if group.rank() == group.size() - 1:
            bits = packed_of(optimizer).shards[0].data.view(torch.int32)
            bits[1] ^= 1
        digests.append(optimizer.digest())
        if group.rank() == group.size() - 1:
            bits[1] ^= 1
            bits[:2] = bits[:2].flip(0)
        return [*digests, optimizer.digest()]

    for ranks in (run_world(1, run)[0], run_world(3, run)[0]):
        for first, again, flipped, swapped in ranks:
            assert first == again and len({first, flipped, swapped}) == 3


def test_a_digest_sees_the_experts_of_every_rank():
    def run(mesh: Any, seeds: tuple[int, int]) -> str:
        generator = torch.Generator().manual_seed(seeds[mesh.get_local_rank("ep")])
        model = nn.ParameterDict({"expert": nn.Parameter(torch.randn(8, 8, generator=generator))})
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            dp=("ep", "edp"),
            experts={"edp": ["expert"]},
        )
        return optimizer.digest()

    seeds = [(0, 1), (0, 2), (3, 1)]
    digests = [set(threaded_world({"ep": 2, "edp": 2}, run, it)) for it in seeds]
    assert all(len(of_ranks) == 1 for of_ranks in digests)
    assert len(set.union(*digests)) == 3
