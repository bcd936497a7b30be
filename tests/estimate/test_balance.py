"""Balance of Muon's matrices over ranks, on models that are built on ``meta`` only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcast.estimate import Estimate, estimate

Shapes = dict[str, tuple[int, ...]]
HEAD = 128


def gpt(dim: int, layers: int) -> Callable[[], Shapes]:
    """Return a GPT's matrices: fused query, key and value, output, two of the MLP."""
    block = {"qkv": (3 * dim, dim), "out": (dim, dim), "fc": (4 * dim, dim), "proj": (dim, 4 * dim)}
    return lambda: repeated(block, layers, {"embedding": (50304, dim)})


def llama(dim: int, kv: int, hidden: int, layers: int) -> Callable[[], Shapes]:
    """Return a Llama's matrices with grouped queries: keys and values have ``kv`` rows."""
    block = {
        **{"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim)},
        **{"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)},
    }
    return lambda: repeated(block, layers, {"embedding": (128256, dim), "head": (128256, dim)})


def mixture(dim: int, hidden: int, layers: int, stacked: bool = False) -> Callable[[], Shapes]:
    """Return 64 experts per layer, in their own matrices or in two stacks."""
    block: Shapes = {"qkv": (3 * dim, dim), "out": (dim, dim), "router": (64, dim)}
    for name, shape in {"up": (hidden, dim), "down": (dim, hidden)}.items():
        if stacked:
            block[name] = (64, *shape)
        else:
            block |= {f"{name}{expert}": shape for expert in range(64)}
    return lambda: repeated(block, layers, {"embedding": (50304, dim)})


def repeated(block: Shapes, layers: int, outside: Shapes) -> Shapes:
    inside = {f"block{n}.{k}": shape for n in range(layers) for k, shape in block.items()}
    norms = {f"norm{n}": (next(iter(outside.values()))[1],) for n in range(layers)}
    return {**inside, **norms, **outside}


MODELS = {
    "GPT 125M": gpt(768, 12),
    "GPT 1.3B": gpt(2048, 24),
    "GPT 7B": gpt(4096, 32),
    "Llama-like 8B": llama(4096, 1024, 14336, 32),
    "Qwen-like 7B": llama(3584, 512, 18944, 28),
    "64 experts": mixture(1024, 1408, 12),
}


def by_heads(dim: int, kv: int, hidden: int, layers: int) -> Callable[[], Shapes]:
    """Like :func:`llama`, with one matrix of queries, keys and values, :data:`HEAD` rows a head."""
    block = {"qkv": (dim + 2 * kv, dim), "o": (dim, dim)}
    block |= {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    return lambda: repeated(block, layers, {"embedding": (128256, dim)})


def blocks_of(name: str, rows: int, heads: bool) -> list[int]:
    return [HEAD] * (rows // HEAD) if heads and name.endswith("qkv") else [rows]


def estimated(shapes: Shapes, size: int, heads: bool = False, **fields: Any) -> Estimate:
    with torch.device("meta"):
        named = {name.replace(".", "_"): nn.Parameter(torch.empty(s)) for name, s in shapes.items()}
        model = nn.ParameterDict(named)
    muon, rest = [], []
    for name, param in named.items():
        (muon if name.startswith("block") else rest).append(param)
    fused = [param for name, param in named.items() if heads and name.endswith("qkv")]
    whole = [param for param in muon if param.dim() == 2 and not any(param is p for p in fused)]
    first = torch.optim.Muon(whole)
    stacks = [param for param in muon if param.dim() == 3]
    if stacks:
        first.add_param_group({"params": stacks})
    for param in fused:
        splits = blocks_of("qkv", len(param), heads)
        first.add_param_group({"params": [param], "row_splits": splits})
    fields = {"shard_ranks": "all", **fields}
    return estimate(model, [first, torch.optim.AdamW(rest)], size, fields)


@pytest.mark.parametrize(("size", "bound"), [(8, 1.1), (64, 1.5)])
@pytest.mark.parametrize("name", MODELS)
def test_the_busiest_rank_computes_little_more_than_the_mean(name: str, size: int, bound: float):
    found = estimated(MODELS[name](), size).cost_imbalance
    if name == "GPT 125M" and size == 64:  # one of its 48 matrices exceeds the bound alone
        assert 1.6 < found < 1.75
    else:
        assert found <= bound


def by_elements(_name: str, param: nn.Parameter) -> float:
    return float(param.numel())


def computed(found: Estimate, heads: bool) -> float:
    """Return the cost of Newton-Schulz on the busiest rank divided by the mean."""
    load = [0.0] * found.layout.world_size
    for pack, slot in found.layout.slots():
        if pack.partition == "whole":
            owner = next(s.owner for s in pack.spans if s.start <= slot.offset < s.stop)
            *stack, rows, columns = slot.shape
            for block in blocks_of(slot.name, rows, heads):
                small, large = sorted((block, columns))
                load[owner] += math.prod(stack) * (4 * small**2 * large + 2 * small**3)
    return max(load) * len(load) / sum(load)


@pytest.mark.parametrize(
    ("shapes", "size", "heads", "mine", "others"),
    [
        (by_heads(2560, 512, 9728, 36), 64, True, 1.06, 1.24),
        (llama(3584, 512, 18944, 28), 8, False, 1.001, 1.02),
        (mixture(4096, 256, 11, stacked=True), 8, False, 1.1, 1.4),
    ],
    ids=["grouped queries, heads apart", "grouped queries", "stacked small experts"],
)
def test_counting_elements_alone_falls_short(
    shapes: Callable[[], Shapes], size: int, heads: bool, mine: float, others: float
):
    """Negative control: the cost per element differs, so balancing elements is not enough."""
    balanced = estimated(shapes(), size, heads)
    misled = estimated(shapes(), size, heads, cost_fn=by_elements)
    assert computed(balanced, heads) <= mine
    assert computed(misled, heads) >= others
    if not heads:
        assert misled.cost_imbalance < 1.1  # balanced by its own count
