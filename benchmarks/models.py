"""Models of the benchmarks, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and the shape of a rank's micro-batch.

    Attributes:
        build: makes an fp32 model from the current random state. The model maps (tokens, targets),
            both int64 (sequences, tokens), to the mean loss, a 0-dim fp32 tensor.
        block: class of the layers that FSDP wraps individually.
    """

    title: str
    build: Callable[[], nn.Module]
    block: type[nn.Module]
    vocabulary: int
    sequences: int
    tokens: int

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return random tokens and targets of one micro-batch; equal for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.sequences, self.tokens)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        # Learnable, so that losses fall and wrong gradients show in them.
        return tokens, (tokens * 7 + 3) % self.vocabulary


class EncoderLayer(nn.Module):
    """Post-norm layer of BERT and ERNIE: 16 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_attention, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, tokens, width = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm_attention(x + self.out(y))
        return self.norm_ffn(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Deep and narrow masked language model with many small tensors, which suits fused updates."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions, self.kinds = nn.Embedding(context, width), nn.Embedding(2, width)
        self.norm_embedding = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(depth))
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        for embedding in (self.words, self.positions, self.kinds):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T) int64 twice -> mean loss, fp32."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        kinds = self.kinds(torch.zeros_like(positions))
        x = self.norm_embedding(self.words(tokens) + self.positions(positions) + kinds)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(F.gelu(self.transform(x))), self.words.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _gpt(recompute: bool = False) -> nn.Module:
    return GPT(
        GPTConfig(
            vocabulary=8192,
            context=128,
            width=512,
            depth=8,
            heads=8,
            checkpoint_activations=recompute,
        )
    )


def _ernie() -> nn.Module:
    return Encoder(vocabulary=8192, width=128, depth=24, heads=4, context=64)


def _embedding() -> nn.Module:
    return Encoder(vocabulary=1 << 17, width=128, depth=2, heads=4, context=64)


def _tiny() -> nn.Module:
    return Encoder(vocabulary=64, width=16, depth=2, heads=2, context=16)


WORKLOADS = {
    "gpt": Workload("GPT", _gpt, Block, 8192, 2, 32),
    "gpt-recompute": Workload(
        "GPT with activation checkpointing", partial(_gpt, True), Block, 8192, 2, 32
    ),
    "ernie": Workload("ERNIE-like encoder", _ernie, EncoderLayer, 8192, 2, 16),
    "embedding": Workload(
        "encoder with a huge embedding", _embedding, EncoderLayer, 1 << 17, 2, 16
    ),
    "tiny": Workload("tiny encoder, to try the command", _tiny, EncoderLayer, 64, 2, 8),
}
