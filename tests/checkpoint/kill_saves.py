"""Kill two processes that save checkpoints, at chosen points or random times; look what is left.

    python tests/checkpoint/kill_saves.py --random 100
    python tests/checkpoint/kill_saves.py --points 1   # at every point, in every way; 50: at fewer

The processes are forked, so that a kill costs a fraction of a second. After each one the directory
must hold a whole old or a whole new checkpoint: every value says which step it is of.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # run as a script, not by pytest
from faults import Counting, at_each_point
from models import job, parts

from shardcast import checkpoint
from shardcast.checkpoint import directory
from shardcast.optimizer.sharded import packed_of

RANKS = 2


def killing(at: int = -1, everybody: bool = False) -> Counting:
    """Kills this process, or all of its group, at one of the points."""
    return Counting(at, lambda: os.kill(0 if everybody else os.getpid(), signal.SIGKILL))


def save_steps(folder: Path, rank: int, steps: range, points: Counting) -> None:
    """One rank: save ``steps``; from the second one on ``points`` counts."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=RANKS
    )
    model, optimizer = job(dist.group.WORLD, steps=0)
    for step in steps:
        with torch.no_grad():
            for master in packed_of(optimizer).shards:
                master.data.fill_(float(step))
        packed_of(optimizer).publish()  # else the parameters are taken for edits of a script
        watched = at_each_point(points) if step > steps[0] else contextlib.nullcontext()
        with watched:
            checkpoint.save(folder, model, optimizer, step=step, keep=2)


def start(folder: Path, steps: range, points_of_ranks: list[Counting]) -> list[int]:
    """Fork the ranks into one process group of the system; their process ids."""
    ranks: list[int] = []
    for rank, points in enumerate(points_of_ranks):
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, ranks[0] if ranks else 0)
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 2)
                save_steps(folder, rank, steps, points)
                (folder / f".seen-{rank}").write_text(
                    "\n".join(point.split()[0] for point in points.seen)
                )
                os._exit(0)
            except BaseException:
                os._exit(1)
        ranks.append(child)
        os.setpgid(child, ranks[0])
    return ranks


def finish(ranks: list[int]) -> None:
    """Kill who waits for a dead rank, and take leave of all."""
    for child in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def whole_step(folder: Path) -> int:
    """The step that is loaded; every master must be of that one."""
    model, optimizer = job(steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that is committed may be damaged
        step = checkpoint.load(folder, model, optimizer).step
    for key, tensor in parts(optimizer).items():
        if key[-1] == "master" and not bool(torch.all(tensor == step)):
            raise AssertionError(f"{key} is not of step {step}: a mixture was loaded")
    return step


def wait_for_first(folder: Path, ranks: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not directory.steps(folder):
        if time.monotonic() > deadline:
            finish(ranks)
            raise TimeoutError("no checkpoint was committed within 30 seconds")
        time.sleep(0.002)


def at_random_times(base: Path, count: int) -> list[int]:
    wheel, found = random.Random(0), []
    for number in range(count):
        folder = base / str(number)
        ranks = start(folder, range(1, 10_000), [killing() for _ in range(RANKS)])
        wait_for_first(folder, ranks)
        time.sleep(wheel.uniform(0.0, 0.15))
        for rank in wheel.choice([[0], [1], [0, 1]]):
            os.kill(ranks[rank], signal.SIGKILL)
        time.sleep(0.02)  # the survivor may go on for a moment
        finish(ranks)
        found.append(whole_step(folder))
        shutil.rmtree(folder)
    return found


def at_points(base: Path, every: int) -> list[int]:
    """Kills of one rank and of all, at each point of a second save; of writes at some.

    With ``every`` above 1 each point gets one of the four, in turn.
    """
    folder = base / "whole"
    ranks = start(folder, range(1, 3), [killing() for _ in range(RANKS)])
    for child in ranks:
        if os.waitpid(child, 0)[1] != 0:
            raise AssertionError("a save without kills failed")
    seen = [(folder / f".seen-{rank}").read_text().split() for rank in range(RANKS)]
    kinds, found = set(), []
    ways = [(r, e) for r in range(RANKS) for e in (False, True)]
    for number, (rank, everybody) in enumerate(ways):
        for at, kind in enumerate(seen[rank]):
            if every > 1 and kind != "write" and (len(seen[rank]) - at) % len(ways) != number:
                continue
            if kind == "write" and at % every:  # chunks are many small writes, much alike
                continue
            folder = base / f"{rank}-{everybody}-{at}"
            points_of_ranks = [killing() for _ in range(RANKS)]
            points_of_ranks[rank] = killing(at, everybody)
            ranks = start(folder, range(1, 3), points_of_ranks)
            status = os.waitpid(ranks[rank], 0)[1]
            if not os.WIFSIGNALED(status):
                raise AssertionError(f"rank {rank} was not killed at point {at}")
            time.sleep(0.02)
            finish([child for child in ranks if child != ranks[rank]])
            kinds.add(kind)
            found.append(whole_step(folder))
            shutil.rmtree(folder)
    print(f"points of {', '.join(sorted(kinds))}")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--points", type=int, default=0, metavar="EVERY")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    job(steps=0)  # so that no fork has to import what torch imports late
    with tempfile.TemporaryDirectory() as name:
        if args.random:
            found = at_random_times(Path(name), args.random)
            print(f"{len(found)} kills at random times; newest step left {max(found)}")
        if args.points:
            found = at_points(Path(name), args.points)
            print(f"{len(found)} kills at points: {found.count(1)} old, {found.count(2)} new")
            if set(found) != {1, 2}:
                raise AssertionError(f"expected old and new states, found {set(found)}")


if __name__ == "__main__":
    sys.exit(main())
