"""Helpers for claims: batches, comparisons, models."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.testing import assert_close
from torch.testing._internal.distributed._tensor.common_dtensor import (
    ModelArgs,
    Transformer,
    TransformerBlock,
)

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW
REDUCTIONS = ("reduce", "alltoall")


def ranks() -> int:
    return dist.get_world_size()


def seed(local: int = 1) -> None:
    torch.manual_seed(42 + dist.get_rank() + local)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, TransformerBlock)]


def same_parity(side: Any, ref: nn.Module, model: nn.Module, optimizer: Any) -> None:
    """Compare weights and gradients, as ``check_sharded_parity`` does."""
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])
    grads = side.grads(model, optimizer)
    for ours, param in zip(grads, ref.parameters(), strict=True):
        assert (ours is None) == (param.grad is None)
        if ours is not None:
            assert_close(ours, param.grad)


def train_beside(
    ref: nn.Module,
    model: nn.Module,
    ref_optimizer: Any,
    optimizer: Any,
    draw: Callable[[], Tensor],
    delays: tuple[float, float] = (0, 0),
) -> None:
    """Train both on the same batches; assert that losses are equal in every step."""
    for index in range(10):
        batch, losses = draw(), []
        for one, steps_by in ((ref, ref_optimizer), (model, optimizer)):
            steps_by.zero_grad(set_to_none=index % 2 == 0)
            losses.append(one(batch).sum())
            if one is model:
                time.sleep(delays[0])
            losses[-1].backward()
            if one is model:
                time.sleep(delays[1])
            steps_by.step()
        assert_close(losses[1], losses[0])


def average(ref: nn.Module) -> None:
    for param in ref.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(ranks())


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(42)
    return Transformer(ModelArgs(dropout_p=0.0, **options))


def single_group(side: Any, *shapes: list[tuple[int, int]]) -> None:
    for first, second in shapes:
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        optimizer = side.shard(model)
        seed()
        batch = torch.randn(4, first[0])
        train_beside(ref, model, ref_optimizer, optimizer, lambda batch=batch: batch)


def multi_group(side: Any, **options: Any) -> None:
    for delays in ((0.02, 0), (0, 0.02)):
        model = transformer(n_layers=3, n_heads=4, vocab_size=1024, max_seq_len=64)
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        optimizer = side.shard(model, modules=blocks_of(model), **options)
        seed()

        def draw() -> Tensor:
            return torch.randint(0, 1024, (3, 64))

        late = delays if dist.get_rank() == 1 else (0, 0)
        train_beside(ref, model, ref_optimizer, optimizer, draw, delays=late)
