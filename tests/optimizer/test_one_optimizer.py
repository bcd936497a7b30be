"""A parameter belongs to one sharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, values
from torch import nn

import shardcast
from shardcast.memory import packed_param
from shardcast.testing import ThreadedWorld


def two(trunk: nn.Module) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(trunk, nn.Linear(3, 2)), nn.Sequential(trunk, nn.Linear(3, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_of_another_sharded_optimizer_is_refused_by_name_on_all_ranks(
    dtype: str, frozen: bool
):
    def run(group: Any) -> None:
        one, other = two(CASES["mlp"].build().requires_grad_(not frozen))
        fields = {"process_group": group, "param_dtype": dtype}
        first = shardcast.shard(one, torch.optim.SGD(one.parameters(), lr=0.1), **fields)
        before = values(other)
        given = torch.optim.SGD(other.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'0.a.weight' and 5 more .* another sharded optim"):
            shardcast.shard(other, given, **fields)
        assert_same_bits(values(other), before)
        head = shardcast.shard(other, torch.optim.SGD(other[1].parameters(), lr=0.1), **fields)
        with pytest.raises(ValueError, match=r"'0.b.bias' .* another sharded optimizer"):
            head.add_param_group({"params": [other[0].b.bias]})
        head.close()
        first.close()
        shardcast.shard(other, given, **fields).close()

    ThreadedWorld(2).run(run)


def test_a_parameter_that_one_rank_alone_has_in_another_sharded_optimizer_is_refused_on_all():
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        if group.rank() == 1:
            packed_param.note(model.a.weight, torch.float32, lambda: None)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'a.weight' belongs to another sharded optimizer"):
            shardcast.shard(model, inner, process_group=group)

    ThreadedWorld(2).run(run)


def test_a_part_of_a_model_that_was_closed_without_restore_goes_on_from_its_masters():
    def run(group: Any) -> None:
        one, other = two(CASES["mlp"].build())
        first = shardcast.shard(one, torch.optim.SGD(one.parameters(), lr=0.1), process_group=group)
        install(one, 0)
        first.step()
        masters = first.full_parameters()
        first.close(restore=False)
        second = shardcast.shard(
            other, torch.optim.SGD(other.parameters(), lr=0.1), process_group=group
        )
        for name, value in second.full_parameters().items():
            assert name.startswith("1.") or torch.equal(value, masters[name]), name

    ThreadedWorld(2).run(run)
