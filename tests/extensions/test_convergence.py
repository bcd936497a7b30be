"""A GPT trained on real text with low-precision moments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from corpus import Corpus
from gpt import GPT, GPTConfig
from pairwise import thinned
from products import by_way_of_fp32
from torch import Tensor

import shardcast

pytestmark = pytest.mark.timeout(240)

STEPS, WARMUP, CONTEXT, BATCH = 80, 12, 64, 8
SEEDS = (0, 1)  # two, since the text differs between Pythons


@functools.cache
def corpus() -> Corpus:
    """Return two megabytes of the standard library's source."""
    return Corpus.load([], CONTEXT, 2 << 20)


def trained(seed: int, **fields: Any) -> tuple[float, list[Tensor]]:
    """Train; return the loss on held-out text, in nats per byte, and the weights."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(context=CONTEXT, width=64, depth=1, heads=4))
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = shardcast.shard(model, plain, max_grad_norm=1.0, **fields)
    # Warm-up and decay, as usual: with a constant rate, two random draws differ by 3 %.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1) * (1 - step / STEPS)
    )
    with by_way_of_fp32(torch.device("cpu")):
        for step in range(STEPS):
            model(*corpus().train_batch(seed, step, 0, BATCH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        with torch.no_grad():
            losses = [model(*batch) for batch in corpus().held_out_batches(64, 32)]
    return torch.stack(losses).mean().item(), [p.detach().clone() for p in model.parameters()]


def test_fewer_bits_train_as_well():
    exact, weights = zip(*(trained(seed) for seed in SEEDS), strict=True)
    assert max(exact) < 3.2, "it must learn: random bytes are 5.55"
    for moments in thinned(2, ("int8", "bf16")):
        found, others = zip(*(trained(seed, moments=moments) for seed in SEEDS), strict=True)
        assert any(not torch.equal(a, b) for a, b in zip(others[0], weights[0], strict=True))
        assert sum(found) < sum(exact) * 1.005
