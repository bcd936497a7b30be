"""Random stories of what stands beside the core: sleeps, attempts and checks of replicas together.

Stories of :mod:`test_attempt_stories`, in which the optimizer sleeps at random points, and bits
turn over: in a span that a rank received, in a buffer, in the master of a copy. Without such a bit
the training is plain torch's to the bit; with one all ranks raise at the step that must see it, and
name it. STORIES_SEED, a number, draws other stories; STORIES, another count of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from models import run_world, sharded
from pairwise import SEED
from spoiled import flip, master, spoil_after_sync
from test_attempt_stories import (
    IN_ANOTHER_FORM,
    Failed,
    Model,
    Step,
    Story,
    drawn,
    expected,
    explode,
    made,
    seed_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld, threaded_world

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
COUNT = int(os.environ.get("STORIES", "48"))
PARTS = 4
KEEPS: list[tuple[str, ...]] = [
    (),
    ("parameters",),
    ("masters",),
    ("state",),
    ("parameters", "state"),
]
DOORS = ["step", "digest", "state_dict", "clip", "train"]


class Bit(NamedTuple):
    """What turns over after the sync of a step, counted from 1, on one rank."""

    kind: str
    step: int
    rank: int


class Sleep(NamedTuple):
    """A sleep behind a step, or before it, behind micro-batches that are run again."""

    keep: tuple[str, ...]
    in_file: bool
    wasted: bool
    door: str
    raises: bool


class Beside(NamedTuple):
    """A story, sleeps by the number of a step, and maybe a bit."""

    story: Story
    sleeps: dict[int, Sleep]
    bit: Bit | None
    in_mesh: bool


def told(number: int) -> Beside:
    draw = random.Random(7_000_003 * SEED + number)
    story = drawn(number + 100_000)
    fields = {**story.fields}
    bit, in_mesh, size = None, False, story.size
    if draw.random() < 0.5 and len(story.steps) > 1:
        kind = draw.choice(["span", "buffer", "master"])
        in_mesh = kind == "master"
        size = 4 if in_mesh else max(2, story.size)
        period = draw.choice([1, 2])
        fields["replica_check"] = period
        fields.pop("broadcast_buffers", None)
        due = [n for n in range(1, len(story.steps)) if n % period == 0]
        if due:
            step, rank = draw.choice(due), draw.randrange(size)
            bit = Bit(kind, step, rank)
    if in_mesh:  # copies of masters
        story = story._replace(low=True, kind="AdamW")
        for option in ("partition", "pack_params", "moments", "offload", "master"):
            fields.pop(option, None)
    steps = [
        step._replace(fails={at: place for at, place in step.fails.items() if at[0] < size})
        for step in story.steps
    ]
    sleeps = {
        n: Sleep(
            draw.choice(KEEPS),
            draw.random() < 0.3,
            draw.random() < 0.3,
            draw.choice(DOORS),
            draw.random() < 0.2,
        )
        for n in range(len(steps))
        if draw.random() < 0.6
    }
    return Beside(story._replace(size=size, fields=fields, steps=steps), sleeps, bit, in_mesh)


def in_span(optimizer: Any, _model: nn.Module) -> None:
    """In what this rank received last, or where it owns all in what it sent."""
    packs = [shard.pack for shard in packed_of(optimizer).shards]
    spans = [(pack, span) for pack in packs for span in pack.layout.owned_spans]
    others = [(pack, span) for pack, span in spans if span.owner != pack.own.owner]
    pack, span = (others or spans)[-1]
    flip(pack.data, span.start, 3)


def in_buffer(_optimizer: Any, model: nn.Module) -> None:
    flip(model.get_buffer("seen"), 1, 9)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(RuntimeError, match=r"wake\(\)"):
        yield


def sleep(optimizer: Any, it: Sleep, folder: str) -> None:
    """Sleep, knock at a door, wake up; or leave by an exception that all ranks raise."""
    with contextlib.suppress(Failed), optimizer.asleep(it.keep, folder if it.in_file else None):
        calls = {
            "step": optimizer.step,
            "digest": optimizer.digest,
            "state_dict": optimizer.state_dict,
            "clip": lambda: optimizer.clip_grad_norm_(1.0),
            "train": optimizer.train,
        }
        with refused():
            calls[it.door]()
        if it.raises:
            raise Failed("rollout")


def play(group: Any, beside: Beside, folder: str) -> Any:
    story, rank = beside.story, group.get_rank() if beside.in_mesh else group.rank()
    model = Model()
    fields = {**story.fields, "on_error": {"action": story.action, "max_failed_steps": 100}}
    fields["param_dtype"] = torch.bfloat16 if story.low else torch.float32
    if beside.in_mesh:
        optimizer = shardcast.shard(
            model,
            made(model, story),
            mesh=group,
            dp=("copies", "dp"),
            fuse="eager",
            shard_ranks="all",
            **fields,
        )
    else:
        optimizer = sharded(model, group, lambda it: made(it, story), **fields)
    if beside.bit is not None and rank == beside.bit.rank:
        change = {"span": in_span, "buffer": in_buffer, "master": master}[beside.bit.kind]
        spoil_after_sync(optimizer, model, change, beside.bit.step)

    def micro_batch(number: int, step: Step, micro: int) -> None:
        place = step.fails.get((rank, micro), "")
        if place == "data":
            raise Failed("data")
        if step.counts:
            optimizer.count(2 + rank)
        with optimizer.no_sync() if step.quiet[micro] else contextlib.nullcontext():
            loss = model(seed_of(number, rank, micro), place)
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
        it = beside.sleeps.get(number)
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


def results_of(beside: Beside, processes: SpawnedWorld | None = None) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        if processes is not None:
            found = processes.run(play, beside, folder)
        elif beside.in_mesh:

            def run(mesh: DeviceMesh) -> Any:
                return play(mesh, beside, folder)

            found = threaded_world({"copies": 2, "dp": 2}, run)
        else:
            found = run_world(beside.story.size, play, beside, folder)[0]
        assert not os.listdir(folder)
    return [*found]


def check(beside: Beside, processes: SpawnedWorld | None = None) -> None:
    results = results_of(beside, processes)
    if beside.bit is not None:
        kind, step, rank = beside.bit
        for text in results:
            assert isinstance(text, str), beside
            assert text.startswith(f"step {step + 1}: replica_check: after step {step} "), text
            if kind == "master":
                assert f"rank {rank} has other masters" in text, (beside, text)
            else:
                named = rank if beside.story.size > 2 else 1  # of two, both may be the one
                what = "parameters" if kind == "span" else "buffers"
                assert f"{what} of rank {named} differ" in text, (beside, text)
        return
    parameters, failures, skipped = expected(beside.story)
    for result in results:
        assert not isinstance(result, str), (beside, result)
        assert result[1:] == (failures, skipped), beside
    found: dict[str, Tensor] = results[0][0]
    if not IN_ANOTHER_FORM & beside.story.fields.keys():
        for name, value in parameters.items():
            assert torch.equal(found[name], value), (name, beside)


def test_stories_are_the_same_in_processes(gloo: SpawnedWorld):
    of_two = [beside for beside in map(told, range(COUNT)) if beside.story.size == 2]
    kinds: dict[str | None, list[Beside]] = {}
    for beside in of_two:
        kinds.setdefault(beside.bit and beside.bit.kind, []).append(beside)
    for beside in [beside for of_kind in kinds.values() for beside in of_kind[: COUNT // 12]]:
        check(beside, gloo)


@pytest.mark.parametrize("part", range(PARTS))
def test_stories_lose_nothing_hang_nowhere_and_name_every_bit(part: int):
    for number in range(part, COUNT, PARTS):
        try:
            check(told(number))
        except BaseException:
            print(f"story {number}: {told(number)}")
            raise
