"""Run a script in plain torch on the unsharded fp32 model, and on each rank of a strict world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import sgd
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld, assert_same_sequence

BATCH = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
Build = Callable[[nn.Module], torch.optim.Optimizer]
Script = Callable[[nn.Module, Any, Tensor, bool], None]  # model, optimizer, batch, sharded


def mlp() -> nn.Sequential:
    """7 -> 13 -> 11 -> 3, fp32: three packs of two parameters, each with padding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def set_grads(model: nn.Module, seed: int) -> None:
    """Set gradients, the same on every rank, for parameters that require one."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        if param.requires_grad:
            param.grad = grad.to(param.dtype)


def steps(count: int, before: Callable[[int, nn.Module, Any], None] | None = None) -> Script:
    """Return a script of ``count`` steps with :func:`set_grads`; ``before`` runs before each."""

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, _sharded: bool) -> None:
        for step in range(count):
            if before is not None:
                before(step, model, optimizer)
            set_grads(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return script


def backwards(count: int, before: Callable[[int, nn.Module, Any], None] | None = None) -> Script:
    """Like :func:`steps`, with a backward on the rank's part of the batch."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool = True) -> None:
        for step in range(count):
            if before is not None:
                before(step, model, optimizer)
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return script


def on_ranks(
    script: Callable[[Any, Any, Tensor], Any], size: int = 2, build: Build = sgd, **fields: Any
) -> list[Any]:
    """Run ``script(model, optimizer, batch)`` on each rank with its part of the batch."""

    def run(group: Any) -> Any:
        model = mlp()
        config = {"param_dtype": "fp32", "pack_params": 2, "fuse": "eager", **fields}
        optimizer = shardcast.shard(model, build(model), process_group=group, **config)
        return script(model, optimizer, BATCH.chunk(size)[group.rank()])

    world = ThreadedWorld(size)
    results = world.run(run)
    assert_same_sequence(world.logs)
    return results


def check(
    build: Build,
    script: Script,
    *,
    worlds: tuple[int, ...] = (1, 2, 3),
    tol: float = 0.0,
    **fields: Any,
) -> None:
    """Run ``script`` on plain torch and on ``worlds`` ranks; parameters must end equal.

    Each rank gets its part of :data:`BATCH`, the oracle all of it. ``tol`` is absolute. Scripts
    with a real backward need it, since they sum over the batch in another order.
    """
    oracle = mlp()
    script(oracle, build(oracle), BATCH, False)

    def run(model: nn.Module, optimizer: Any, batch: Tensor) -> list[Tensor]:
        assert len(optimizer.layout.packs) >= 2
        assert optimizer.layout.padding > 0
        script(model, optimizer, batch, True)
        return values(model)

    for size in worlds:
        for params in on_ranks(run, size, build, **fields):
            for mine, theirs in zip(params, oracle.parameters(), strict=True):
                assert (mine - theirs).abs().max() <= tol


Optimizers = list[torch.optim.Optimizer]


def pair(model: nn.Module, **options: Any) -> Optimizers:
    """Return Muon for the matrices, which are tall and wide, and AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, **{"lr": 1e-2, **options}), torch.optim.AdamW(rest, lr=1e-2)]


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)
