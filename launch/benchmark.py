"""Measure the collectives that shardcast could use, side by side, in interleaved rounds.

    python launch/benchmark.py --ranks 2 --elements 33554432 --rounds 7

Each line is the median over rounds of the slowest rank, for bf16 gradients or parameters of so
many elements cut in packs; the ratio is to the first line of its block, taken in the same round.
The defaults of `reduce` and `sync` on gloo come from this command.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.testing import spawn

CHUNK = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results = spawn(
        measure, args.ranks, args.elements // args.packs, args.packs, args.rounds, timeout=600.0
    )
    print(f"torch {torch.__version__}, gloo, {args.ranks} ranks, {args.elements:,} bf16 elements")
    for block in ("reduce", "sync"):
        rows = {name: times for (kind, name), times in results[0].items() if kind == block}
        first = next(iter(rows.values()))
        print(f"{block}:")
        for name, times in rows.items():
            ratio = statistics.median(t / f for t, f in zip(times, first, strict=True))
            print(f"  {name:32} {1e3 * statistics.median(times):8.1f} ms  x {ratio:.2f}")


def measure(
    group: dist.ProcessGroup, elements: int, packs: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of the slowest rank per round; each round runs every candidate once."""
    world, rank = group.size(), group.rank()
    size = elements // world // 64 * 64
    full = torch.randn(packs, size * world).bfloat16()
    spare, mean = torch.empty_like(full[0]), torch.empty(size, dtype=torch.bfloat16)

    def exchange(pack: Tensor) -> None:
        dist.all_to_all_single(spare, pack)
        pieces = spare.view(world, size)
        for start in range(0, size, CHUNK):
            part = slice(start, start + CHUNK)
            total = pieces[0, part].float()
            for piece in pieces[1:]:
                total += piece[part]
            mean[part] = total / world

    def owners(pack: Tensor, collective: Callable[[Tensor, int], object]) -> None:
        for owner in range(world):
            collective(pack[owner * size : (owner + 1) * size], owner)

    candidates: dict[tuple[str, str], Callable[[Tensor], object]] = {
        ("reduce", "all-to-all + fp32 sum"): exchange,
        ("reduce", "reduce to each owner"): lambda p: owners(p, lambda t, o: dist.reduce(t, o)),
        ("reduce", "all-reduce"): dist.all_reduce,
        ("reduce", "reduce-scatter"): lambda p: _compat.reduce_scatter_flat(mean, p, group),
        ("sync", "broadcast from each owner"): lambda p: owners(
            p, lambda t, o: dist.broadcast(t, o)
        ),
        ("sync", "all-gather"): lambda p: _compat.all_gather_flat(
            p, p[rank * size : (rank + 1) * size], group
        ),
    }
    times: dict[tuple[str, str], list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            full.fill_(1.0)  # repeated sums would overflow
            dist.barrier()
            start = time.perf_counter()
            for pack in full:
                run(pack)
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                times[name].append(slowest.item())
    return times


if __name__ == "__main__":
    main()
