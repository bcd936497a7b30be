"""Part 3: host time of backward and ``step()`` by number of packs; nothing is sent."""

from __future__ import annotations

from statistics import median

from benchmarks import host

from gpu.bench import Bench

PACKS = {False: (1, 16, 40, 131), True: (1, 4)}
ROUNDS = {False: 60, True: 2}
RANKS = 8


def run(bench: Bench) -> None:
    for packs in PACKS[bench.dry]:
        with bench.row(packs=packs, ranks=RANKS) as found:
            fuse = "eager" if bench.dry else "compile"
            costs = host.one(host.Costs(packs, RANKS), ROUNDS[bench.dry], bench.device, fuse)
            for name, seconds in (("backward", costs.backward), ("step", costs.step)):
                found[f"{name} us"] = round(1e6 * median(seconds))
                found[f"{name} us, least"] = round(1e6 * min(seconds))
