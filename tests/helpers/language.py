"""A small language model for hybrid jobs: sequence parallelism, and parameters of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB, LENGTH = 11, 6


class FeedForward(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Tokens to logits. ``gain`` stays a plain parameter, on a part of the sequence."""

    def __init__(self, width: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gain = nn.Parameter(torch.ones(dim))
        self.norm, self.last = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wide = FeedForward(dim, width)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain
        return self.head(self.last(x + self.wide(self.norm(x))))


PARTS = {"tp": ["gain"]}  # grad_sum_over of Language


def parallel(model: Language, mesh: DeviceMesh) -> Language:
    """``model`` over the tensor-parallel ``mesh``, its activations cut along the sequence."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "wide": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "wide.up": ColwiseParallel(use_local_output=False),
        "wide.down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelized: Language = parallelize_module(model, mesh, plan)
    return parallelized


def batches(steps: int, size: int = 8) -> Iterator[Tensor]:
    """Global batches of tokens, which follow a rule that can be learned."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        start = torch.randint(VOCAB, (size, 1), generator=generator)
        yield (start + 3 * torch.arange(LENGTH + 1)) % VOCAB


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
