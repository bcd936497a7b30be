"""Random combinations of options: attempts, counted tokens, sleeps, and flipped bits.

Ranks fail at random places of micro-batches, the optimizer sleeps at random points, and bits flip
in a received span, in a buffer, or in the master of a copy. Gradients are known multiples of 1/64,
so sums and means are exact, or rounded where the library rounds. Without a flipped bit, training is
bitwise equal to plain torch. With one, all ranks raise at the step that must detect it, and name
it. STORIES_SEED, a number, draws other stories, as in a nightly run; STORIES sets their count.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from models import run_world, sharded
from pairwise import SEED, WHOLE
from sequences import Fail
from spoiled import flip, master, received, spoil_after_sync
from stories import SHAPES, Dots, gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardcast.testing import SpawnedWorld, threaded_world

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
COUNT = int(os.environ.get("STORIES", "72" if WHOLE else "48"))
PARTS = 6
PLACES = ["data", "forward", "loss", "half way", "hook", "late"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"averages": {"ema": 0.75}},
    {"metrics": 2},
    {"guard": {"norm": 50.0, "window": 64}},
    {"replica_check": 1},
    {"overlap_sync": True},
    {"offload": True},
    {"pack_params": 1},
    {"partition": "whole"},
    {"max_grad_norm": 1e6},
    {"moments": "int8"},
    {"master": "split16"},
    {"broadcast_buffers": False},
]
LOW_ONLY, FUSED_ONLY, IN_ANOTHER_FORM = {"master"}, {"moments", "master", "offload"}, {"moments"}
KEEPS = [(), ("parameters",), ("masters",), ("state",), ("parameters", "state")]
DOORS: dict[str, Callable[[Any], Any]] = {  # calls that a sleeping optimizer refuses
    "step": lambda it: it.step(),
    "digest": lambda it: it.digest(),
    "state_dict": lambda it: it.state_dict(),
    "clip": lambda it: it.clip_grad_norm_(1.0),
    "train": lambda it: it.train(),
}


class Failed(Exception):  # noqa: N818
    """Raised by failing ranks."""


def explode(_param: Tensor) -> None:
    raise Failed("hook")


class Model(Dots):
    """A model with a buffer, which is sent before a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def loss(self, seed: int, place: str) -> Tensor:
        if place == "forward":
            raise Failed("forward")
        self.seen.add_(1)
        numbers = [n for n in range(len(SHAPES)) if (seed + n) % 4]  # some have no gradient
        terms = [(self.all[n] * gradient(seed, n)).sum() for n in numbers]
        if place == "half way":
            terms[len(terms) // 2] = Fail.apply(terms[len(terms) // 2])
        return torch.stack(terms).float().sum()

    def forward(self, seed: int, place: str) -> Tensor:  # type: ignore[override]
        return self.loss(seed, place)


# -- stories --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step: which micro-batches are in no_sync, and which ranks fail in them, and where."""

    quiet: list[bool]
    fails: dict[tuple[int, int], str]  # by rank and micro-batch
    apart: bool  # each micro-batch has its own attempt
    counts: bool


class Bit(NamedTuple):
    """A bit that flips on one rank after the sync of a step, counted from 1."""

    kind: str
    step: int
    rank: int


class Sleep(NamedTuple):
    """A sleep after a step or, if ``wasted``, before it, after micro-batches that are repeated."""

    keep: tuple[str, ...]
    in_file: bool
    wasted: bool
    door: str
    raises: bool


class Story(NamedTuple):
    """A run in a world of ``size`` ranks, with sleeps by step, and perhaps a flipped bit."""

    size: int
    low: bool
    kind: str
    action: str
    fields: Mapping[str, Any]
    steps: list[Step]
    sleeps: dict[int, Sleep]
    bit: Bit | None
    in_mesh: bool


def drawn(number: int) -> Story:
    draw = random.Random(7_000_003 * SEED + number)
    size, low = draw.randint(1, 4), draw.random() < 0.4
    kind = draw.choice(["AdamW", "SGD", "NAdam"])
    action = draw.choice(["skip", "drop"])
    fields: dict[str, Any] = {}
    for option in draw.sample(OPTIONS, 2):
        keys = option.keys()
        if (low or not keys & LOW_ONLY) and (kind != "NAdam" or not keys & FUSED_ONLY):
            fields |= option
    counts, steps = draw.random() < 0.3, list[Step]()
    for _ in range(draw.randint(2, 6)):
        count = draw.randint(1, 3)
        fails = {}
        if draw.random() < 0.6 and (steps or not counts):  # repeats the last step's count
            for rank in range(size):
                if draw.random() < 0.5:
                    fails[rank, draw.randrange(count)] = draw.choice(PLACES)
        quiet = [draw.random() < 0.5 for _ in range(count)]
        steps.append(Step(quiet, fails, draw.random() < 0.3, counts))
    bit, in_mesh = None, False
    if draw.random() < 0.3:
        of = draw.choice(["span", "buffer", "master"])
        in_mesh, period = of == "master", draw.choice([1, 2])
        size = 4 if in_mesh else max(2, size)
        fields["replica_check"] = period
        fields.pop("broadcast_buffers", None)
        if due := [n for n in range(1, len(steps)) if n % period == 0]:
            bit = Bit(of, draw.choice(due), draw.randrange(size))
    if in_mesh:  # masters have copies
        low, kind = True, "AdamW"
        for name in ("partition", "pack_params", "moments", "offload", "master"):
            fields.pop(name, None)
    sleeps = {
        n: Sleep(
            draw.choice(KEEPS),
            draw.random() < 0.3,
            draw.random() < 0.3,
            draw.choice([*DOORS]),
            draw.random() < 0.2,
        )
        for n in range(len(steps))
        if draw.random() < 0.4
    }
    return Story(size, low, kind, action, fields, steps, sleeps, bit, in_mesh)


def made(model: nn.Module, story: Story) -> torch.optim.Optimizer:
    momentum = {"momentum": 0.9} if story.kind == "SGD" else {}
    kind: Any = getattr(torch.optim, story.kind)
    return kind(model.parameters(), lr=1e-2, foreach=False, **momentum)


def seed_of(step: int, rank: int, micro: int) -> int:
    return 13 * step + 5 * rank + micro


# -- in plain torch -------------------------------------------------------------------------------


def expected(story: Story) -> tuple[dict[str, Tensor], Any, int]:
    """Return parameters, failures by step and rank, and the number of skipped steps."""
    model, failures, skipped = Model(), list[tuple[int, int]](), 0
    optimizer = made(model, story)
    for number, step in enumerate(story.steps):
        failed = sorted({rank for rank, _ in step.fails})
        failures += [(number + 1, rank) for rank in failed]
        taking = [rank for rank in range(story.size) if rank not in failed]
        if not taking or (failed and story.action == "skip"):
            skipped += 1
            continue
        sums: dict[int, Tensor] = {}
        for rank in taking:
            for micro in range(len(step.quiet)):
                model.loss(seed_of(number, rank, micro), "").backward()
            for n, param in enumerate(model.all):
                if param.grad is not None:
                    sums[n] = sums.get(n, 0.0) + param.grad.double()
                    param.grad = None
        scale = torch.tensor(len(taking), dtype=torch.float64) / story.size
        if step.counts:
            tokens = sum(2.0 + rank for rank in taking) * len(step.quiet)
            scale = torch.tensor(tokens, dtype=torch.float64) / story.size
        for n, total in sums.items():
            mean = (total / story.size).float()
            if story.low and SHAPES[n]:
                mean = (total.float() / story.size).bfloat16().float()
            model.all[n].grad = mean * (1.0 / scale).float()
        optimizer.step()
        for param in model.all:
            param.grad = None
    return {f"all.{n}": param.detach() for n, param in enumerate(model.all)}, failures, skipped


# -- on a rank ------------------------------------------------------------------------------------


def in_buffer(_optimizer: Any, model: nn.Module) -> None:
    flip(model.get_buffer("seen"), 1, 9)


def sleep(optimizer: Any, it: Sleep, folder: str) -> None:
    """Sleep, make a refused call, and wake up, perhaps through an exception on all ranks."""
    with contextlib.suppress(Failed), optimizer.asleep(it.keep, folder if it.in_file else None):
        with pytest.raises(RuntimeError, match=r"wake\(\)"):
            DOORS[it.door](optimizer)
        if it.raises:
            raise Failed("rollout")


def play(group: Any, story: Story, folder: str) -> Any:
    """Return parameters, failures and skipped steps, or the error of a step."""
    rank = group.get_rank() if story.in_mesh else group.rank()
    model = Model()
    fields = {**story.fields, "on_error": {"action": story.action, "max_failed_steps": 100}}
    fields["param_dtype"] = torch.bfloat16 if story.low else torch.float32
    if story.in_mesh:
        fields |= {"mesh": group, "dp": ("copies", "dp"), "shard_ranks": "all"}
        group = None
    optimizer = sharded(model, group, lambda it: made(it, story), **fields)
    if story.bit is not None and rank == story.bit.rank:
        change = {"span": received, "buffer": in_buffer, "master": master}[story.bit.kind]
        spoil_after_sync(optimizer, model, change, story.bit.step)

    def micro_batch(number: int, step: Step, micro: int) -> None:
        place = step.fails.get((rank, micro), "")
        if place == "data":
            raise Failed("data")
        if step.counts:
            optimizer.count(2 + rank)
        with optimizer.no_sync() if step.quiet[micro] else contextlib.nullcontext():
            loss = model(seed_of(number, rank, micro), place)
            if place == "loss":  # fails before the backward reaches the model's output
                loss = Fail.apply(loss)
            params = model.all if place == "hook" else ()
            handles = [param.register_post_accumulate_grad_hook(explode) for param in params]
            try:
                optimizer.scale_loss(loss).backward()
            finally:
                for handle in handles:
                    handle.remove()
        if place == "late":
            raise Failed("late")

    def attempts(number: int, step: Step) -> None:
        micros = range(len(step.quiet))
        for attempt in [[m] for m in micros] if step.apart else [[*micros]]:
            with optimizer.attempt():
                for micro in attempt:
                    micro_batch(number, step, micro)

    for number, step in enumerate(story.steps):
        it = story.sleeps.get(number)
        if it is not None and it.wasted:
            attempts(number, step)
            sleep(optimizer, it, folder)  # drops the gradients
        attempts(number, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"step {number + 1}: {error}"
        optimizer.zero_grad()
        if it is not None and not it.wasted:
            sleep(optimizer, it, folder)
    failures = [(it.step, it.rank) for it in optimizer.failures()]
    return optimizer.full_parameters(), failures, optimizer.skipped_steps


def results_of(story: Story, processes: SpawnedWorld | None = None) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        if processes is not None:
            found = processes.run(play, story, folder)
        elif story.in_mesh:

            def run(mesh: DeviceMesh) -> Any:
                return play(mesh, story, folder)

            found = threaded_world({"copies": 2, "dp": 2}, run)
        else:
            found = run_world(story.size, play, story, folder)[0]
        assert not os.listdir(folder)
    return [*found]


def check(story: Story, processes: SpawnedWorld | None = None) -> None:
    results = results_of(story, processes)
    if story.bit is not None:
        kind, step, rank = story.bit
        for text in results:
            assert isinstance(text, str), story
            assert re.match(f"step {step}: .*replica_check: after step {step} ", text), (
                story,
                text,
            )
            if kind == "master":
                assert "masters of rank 1 along 'copies' differ" in text, (story, text)
            else:
                named = rank if story.size > 2 else 1  # with two ranks, either may be at fault
                what = "parameters" if kind == "span" else "buffers"
                assert f"{what} of rank {named} differ" in text, (story, text)
        return
    parameters, failures, skipped = expected(story)
    for result in results:
        assert not isinstance(result, str), (story, result)
        assert result[1:] == (failures, skipped), story
    found: dict[str, Tensor] = results[0][0]
    if not IN_ANOTHER_FORM & story.fields.keys():
        for name, value in parameters.items():
            assert torch.equal(found[name], value), (name, story)


def test_stories_are_the_same_in_processes(gloo: SpawnedWorld):
    kinds: dict[str | None, list[Story]] = {}
    for story in map(drawn, range(COUNT)):
        if story.size == 2:
            kinds.setdefault(story.bit and story.bit.kind, []).append(story)
    for story in [story for of_kind in kinds.values() for story in of_kind[: COUNT // 12]]:
        check(story, gloo)


@pytest.mark.parametrize("part", range(PARTS))
def test_stories_are_plain_torch_to_the_bit_hang_nowhere_and_name_every_bit(part: int):
    for number in range(part, COUNT, PARTS):
        try:
            check(drawn(number))
        except BaseException:
            print(f"story {number}: {drawn(number)}")
            raise
