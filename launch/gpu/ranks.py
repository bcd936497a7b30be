"""Two ranks, on one card if there is only one; over NCCL if it allows that, else over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from gpu.bench import Bench
from shardcast.testing import spawn_world

MULTI_RANK = (2, 30)  # the first NCCL that lets ranks share a card


def backend_for(bench: Bench) -> str:
    """Return the backend for two ranks on this machine."""
    if bench.dry:
        return "gloo"
    shared = torch.cuda.device_count() < 2 and torch.cuda.nccl.version() < MULTI_RANK
    return "gloo" if shared else "nccl"


def on_ranks(
    bench: Bench, work: Callable[..., Any], *args: Any, ranks: int = 2, share: float = 0.6
) -> list[Any]:
    """Run ``work(group, *args)`` on several ranks within a ``share`` of the time left.

    The dry run forks, to avoid importing torch again, so this must precede the first backward.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    method = "fork" if bench.dry else "spawn"
    backend = backend_for(bench)
    with spawn_world(
        ranks, timeout=share * bench.left, backend=backend, start_method=method
    ) as world:
        return world.run(work, *args)
