"""A small GPT over bytes: pre-norm blocks, learned positions, causal attention.

Shapes: B sequences, T tokens (at most ``context``), V vocabulary, D width.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 256
    context: int = 128
    width: int = 192
    depth: int = 4
    heads: int = 4
    tie_head: bool = False  # the output head shares the weight of the token embedding
    checkpoint_activations: bool = False  # recompute each block in backward

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> GPTConfig:
        """Read the fields from the flags of a training script, which has more flags."""
        return cls(**{f.name: vars(arguments)[f.name] for f in fields(cls) if f.name in arguments})


def gpt_7b() -> GPT:
    """Return 6.7 B parameters, like Llama 7B, for ``shardcast estimate gpt:gpt_7b``."""
    return GPT(GPTConfig(vocabulary=32_000, context=2048, width=4096, depth=32, heads=32))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D); position t attends to positions <= t."""
        batch, tokens, width = x.shape
        # Head by head, so that a tensor-parallel rank's rows of qkv are whole heads.
        qkv = self.qkv(x).view(batch, tokens, -1, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, D / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """The whole model, or the layers that :meth:`keep` leaves."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens: nn.Embedding | None = nn.Embedding(config.vocabulary, config.width)
        self.positions: nn.Embedding | None = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.depth)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(config.width)
        self.head: nn.Linear | None = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tie_head:
            self.head.weight = self.tokens.weight
        self._initialize()

    def _initialize(self) -> None:
        """N(0, 0.02) weights, / sqrt(2 depth) if they write to the residual stream; zero biases."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for block in self.blocks.values():
                block.attention.out.weight /= (2 * self.config.depth) ** 0.5
                block.mlp[2].weight /= (2 * self.config.depth) ** 0.5

    def keep(self, stage: int, stages: int) -> GPT:
        """Drop the layers of other pipeline stages; those of this one keep their names."""
        depth = self.config.depth
        if stages > depth:
            raise ValueError(f"{stages} pipeline stages need as many blocks, there are {depth}")
        own = range(depth * stage // stages, depth * (stage + 1) // stages)
        for i in range(depth):
            if i not in own:
                del self.blocks[str(i)]
        if stage > 0:
            self.tokens = self.positions = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) int64 -> logits (B, T, V), or the mean loss in nats per token (fp32 scalar).

        A pipeline stage takes (B, T, D) from the previous stage, and returns it for the next one.
        """
        x = tokens
        if self.tokens is not None and self.positions is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks.values():
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Append `count` sampled tokens to `prompt` (B, T); the generator lives on the CPU."""
        tokens = prompt
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float().cpu()
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen.to(tokens.device)], dim=1)
        return tokens
