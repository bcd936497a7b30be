"""By which collective a pack travels: the rules of ``auto``, one row for each of them."""

from __future__ import annotations

import pytest
import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import Topology, choose

BF16, FP32 = torch.bfloat16, torch.float32
NCCL, GLOO, CARDS = (
    Topology("nccl", 8, on_host=False),
    Topology("gloo", 8),
    Topology("gloo", 8, on_host=False),
)


@pytest.mark.parametrize(
    ("topology", "size", "equal", "dtype", "expected"),
    [
        (NCCL, 8, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 8, True, FP32, ("reduce_scatter", "all_gather")),
        (NCCL, 64, True, FP32, ("reduce_scatter", "all_gather")),
        (NCCL, 64, True, BF16, ("two_level", "all_gather")),
        (NCCL._replace(node=3), 9, True, BF16, ("two_level", "all_gather")),
        (NCCL._replace(node=2), 64, True, BF16, ("all_to_all", "all_gather")),
        (NCCL._replace(node=1), 64, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 12, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 8, False, BF16, ("all_to_all", "broadcast")),
        (NCCL, 64, False, FP32, ("all_to_all", "broadcast")),
        (GLOO, 8, True, FP32, ("all_to_all", "messages")),
        (GLOO, 16, True, BF16, ("two_level", "all_gather")),
        (GLOO._replace(node=2), 4, True, BF16, ("all_to_all", "all_gather")),
        (GLOO._replace(node=1), 4, True, BF16, ("all_to_all", "messages")),
        (GLOO, 16, False, BF16, ("all_to_all", "messages")),
        (CARDS, 8, True, BF16, ("all_to_all", "all_gather")),
        (CARDS, 8, False, BF16, ("all_to_all", "broadcast")),
    ],
)
@pytest.mark.parametrize("length", [128, 1 << 27])
def test_the_rules_of_auto_hold_at_any_length(
    topology: Topology,
    size: int,
    equal: bool,
    dtype: torch.dtype,
    expected: tuple[str, str],
    length: int,
):
    lengths = [length] * (size - 1) + [length - (0 if equal else 64)]
    assert choose(ShardcastConfig(), topology, lengths, dtype)[:2] == expected


def test_what_is_asked_for_is_taken_and_one_rank_needs_no_collective():
    lengths = [128] * 64
    asked = ShardcastConfig(reduce="reduce_scatter", sync="broadcast")
    assert choose(asked, NCCL, lengths, BF16)[:2] == ("reduce_scatter", "broadcast")
    assert choose(ShardcastConfig(), NCCL, [128], BF16)[:2] == ("", ""), "one rank sends nothing"
