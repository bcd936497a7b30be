"""The collectives that shardcast could use, side by side.

The defaults of `reduce` and `sync` on gloo come from this command.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm, Work

CHUNK = 1 << 16
Times = dict[tuple[str, str], list[float]]


def rows(results: Times) -> list[tuple[str, ...]]:
    """Stage, collective, milliseconds, and the ratio to the stage's first in the same round."""
    first: dict[str, list[float]] = {}
    found = []
    for (kind, name), times in results.items():
        base = first.setdefault(kind, times)
        ratio = statistics.median(t / f for t, f in zip(times, base, strict=True))
        milliseconds = 1e3 * statistics.median(times)
        found.append((f"{kind}: {name}", f"{milliseconds:.1f}", f"{ratio:.2f}"))
    return found


def measure(group: dist.ProcessGroup, elements: int, packs: int, rounds: int) -> Times:
    """Seconds of the slowest rank per round; each round runs every candidate once."""
    world, rank = group.size(), group.rank()
    size = elements // world // 64 * 64
    comm = Comm(group)
    full = torch.randn(packs, size * world).bfloat16()
    spare, mean = torch.empty_like(full[0]), torch.empty(size, dtype=torch.bfloat16)

    def exchange(pack: Tensor) -> None:
        dist.all_to_all_single(spare, pack)
        add_up()

    def pairs(pack: Tensor) -> None:
        comm.all_to_all(spare, pack, [size] * world, [size] * world).wait()
        add_up(own=pack[rank * size : (rank + 1) * size])

    def add_up(own: Tensor | None = None) -> None:
        pieces = list(spare.split(size))
        pieces[rank] = pieces[rank] if own is None else own
        for start in range(0, size, CHUNK):
            part = slice(start, start + CHUNK)
            total = pieces[0][part].float()
            for piece in pieces[1:]:
                total += piece[part]
            mean[part] = total / world

    def owners(pack: Tensor, collective: Callable[[Tensor, int], object]) -> None:
        for owner in range(world):
            collective(pack[owner * size : (owner + 1) * size], owner)

    candidates: dict[tuple[str, str], Callable[[Tensor], object]] = {
        ("reduce", "all-to-all + fp32 sum"): exchange,
        ("reduce", "messages + fp32 sum, as shardcast does"): pairs,
        ("reduce", "reduce to each owner"): lambda p: owners(p, lambda t, o: dist.reduce(t, o)),
        ("reduce", "all-reduce"): dist.all_reduce,
        ("reduce", "reduce-scatter"): lambda p: _compat.reduce_scatter_flat(mean, p, group=group),
        ("sync", "broadcast from each owner"): lambda p: owners(
            p, lambda t, o: dist.broadcast(t, o)
        ),
        ("sync", "messages, all packs at once, as shardcast does"): lambda p: comm.send_to_all(
            p.split(size)
        ),
        ("sync", "all-gather"): lambda p: _compat.all_gather_flat(
            p, p[rank * size : (rank + 1) * size], group
        ),
    }
    times: Times = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            full.fill_(1.0)  # repeated sums would overflow
            dist.barrier()
            start = time.perf_counter()
            for started in [run(pack) for pack in full]:
                if isinstance(started, Work):
                    started.wait()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                times[name].append(slowest.item())
    return times
