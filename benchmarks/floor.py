"""Crude hand-written floor: the cost of a step for one model without any checks.

It has flat buffers, an all-to-all of spans after the backward, a sum in fp32, AdamW in chunks, and
a broadcast. It has no overlap, norm or groups, saves no state, and does not check for infinities or
missing gradients. It is not a library: it shows how little a library could cost.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHUNK = 1 << 16


class Floor:
    """bf16 parameters and gradients in two flat buffers, fp32 masters of one span per rank."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.world, self.rank, self.lr = dist.get_world_size(), dist.get_rank(), lr
        params = list(model.parameters())
        total = sum(param.numel() for param in params)
        self.span = -(-total // (self.world * 64)) * 64
        full = torch.zeros(self.span * self.world)
        self.low = torch.empty_like(full, dtype=torch.bfloat16)
        self.grads = torch.zeros_like(self.low)
        start = 0
        for param in params:
            part = slice(start, start + param.numel())
            full[part] = param.detach().flatten()
            param.data = self.low[part].view(param.shape)
            param.grad = self.grads[part].view(param.shape)
            start = part.stop
        dist.broadcast(full, 0)
        self.low.copy_(full)
        self.master = self._span(full, self.rank).clone()
        self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.received = torch.empty_like(self.low)
        self.steps = torch.zeros(())

    def _span(self, flat: Tensor, owner: int) -> Tensor:
        return flat[owner * self.span : (owner + 1) * self.span]

    @torch.no_grad()
    def step(self) -> None:
        """Reduce, update and cast, broadcast."""
        dist.all_to_all_single(self.received, self.grads)
        self.steps += 1
        pieces = self.received.view(self.world, self.span)
        low = self._span(self.low, self.rank)
        for start in range(0, self.span, CHUNK):
            part = slice(start, min(start + CHUNK, self.span))
            mean = pieces[0, part].float()
            for piece in pieces[1:]:
                mean += piece[part]
            mean /= self.world
            master = self.master[part]
            torch._fused_adamw_(
                [master],
                [mean],
                [self.moments[0][part]],
                [self.moments[1][part]],
                [],
                [self.steps],
                lr=self.lr,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.01,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            low[part] = master
        for owner in range(self.world):
            dist.broadcast(self._span(self.low, owner), owner)
        self.grads.zero_()
