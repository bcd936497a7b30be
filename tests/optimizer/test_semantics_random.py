"""Random sequences of what training scripts do, compared with plain torch.

A story is a run of the actions of ``stories.py`` with random options, in one or several worlds. A
normal run always draws the same stories. STORIES_SEED, a number, draws others, as in a nightly run.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from pairwise import SEED
from stories import AVERAGES, COMPUTED, EDITS, KINDS, NUMBERS, SHAPES, Seen, Side, Start, Way

from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(300)
FUSED = "AdamW", "SGD"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Action = tuple[Callable[..., None], tuple[Any, ...]]
uses = st.frozensets(st.sampled_from(NUMBERS), max_size=len(SHAPES))
per_rank = st.tuples(uses, uses, uses, uses)
shared = uses.map(lambda numbers: (numbers | {1},) * 4)  # every rank runs a backward
several = st.lists(st.integers(0, 50), min_size=1, max_size=3)
mixed = st.lists(st.tuples(st.integers(0, 50), shared), min_size=1, max_size=3)
zeros = st.sampled_from(["none", "zeros", "model"])
edits = st.sampled_from(["", "", *EDITS])
clips = st.sampled_from(
    [
        *((), (), (("norm", 0.5),), (("value", 0.25),)),
        *((("value", 0.5), ("norm", 2.0)), (("norm", 2.0), ("value", 0.125))),
    ]
)
# Look after two steps of three: a look ends an overlapped sync.
looks = st.sampled_from([True, True, False])
hows = st.tuples(zeros, clips, edits, st.booleans(), st.booleans(), looks)
places, sizes = st.sampled_from([0, 2]), st.sampled_from([1, 2, 4])


class Interleavings(RuleBasedStateMachine):
    """Collects actions, and runs them in plain torch and in strict worlds at the end."""

    partition, accumulate = "even", "local"

    def __init__(self) -> None:
        super().__init__()
        self.start, self.size, self.actions = Start(), 1, []
        self.dropped = False  # whether gradients were thrown away since the last step
        self.zeros = False  # gradients were cleared in place
        self.worlds: list[tuple[int, list[Action], Way]] = []

    @initialize(
        size=sizes,
        kind=st.sampled_from(sorted(KINDS)),
        norm=st.sampled_from([None, 1.0]),
        frozen=st.sampled_from([None, None, 0, 3]),
        packs=st.sampled_from([1, 2, None]),
        overlap=st.booleans(),
        lists=st.booleans(),
        dtype=st.sampled_from([FP32, BF16, FP16]),
        averages=st.booleans(),
        metrics=st.booleans(),
        split=st.booleans(),
        offload=st.booleans(),
    )
    def begin(
        self,
        size: int,
        kind: str,
        norm: float | None,
        frozen: int | None,
        packs: Any,
        overlap: bool,
        lists: bool,
        dtype: torch.dtype,
        averages: bool,
        metrics: bool,
        split: bool,
        offload: bool,
    ) -> None:
        fields = {
            "offload": offload,
            "partition": self.partition,
            "accumulate": self.accumulate,
            "pack_params": packs,
            "overlap_sync": overlap,
            "max_skipped_steps": 1000,
            "metrics": metrics,
            "averages": AVERAGES if averages else (),
            "master": "split16" if split and dtype == BF16 and kind in FUSED else "fp32",
        }
        self.start, self.size = Start(kind, norm, frozen, lists, dtype, fields), size

    def act(self, method: Callable[..., None], *args: Any) -> None:
        self.actions.append((method, args))

    @rule(seeds=several, use=per_rank, how=hows)
    def quiet_backwards_and_a_step(self, seeds: list[int], use: Any, how: Any) -> None:
        if self.accumulate == "sharded":  # every backward is collective
            use = (use[0] | {1},) * 4
        self.train([(seed, use, True, "") for seed in seeds], how)

    @rule(batches=mixed, way=st.sampled_from(["", "inputs", "twice"]), how=hows)
    def synchronised_backwards_and_a_step(self, batches: list[Any], way: str, how: Any) -> None:
        """An edit that reads gradients gathers them between the backwards."""
        self.train([(seed, use, False, way) for seed, use in batches], how)

    @rule(seed=st.integers(0, 50), use=per_rank, how=hows)
    def a_synchronised_backward_of_some_ranks_and_a_step(
        self, seed: int, use: Any, how: Any
    ) -> None:
        """The other ranks have no batch, or one without trained parameters; they count as zeros.

        All ranks have a batch after a dropped backward, which the others' step would mistake for
        this one, and before edits: the others get gradients only in the step. DDP always hangs.
        """
        if self.dropped or how[2]:
            use = tuple(numbers | {1} for numbers in use)
        if self.accumulate != "sharded":  # every backward is collective
            self.train([(seed, use, False, "")], how)

    def train(self, backwards: list[tuple[Any, ...]], how: tuple[Any, ...]) -> None:
        zero, clips, edit, by_closure, gather, look = how
        if self.accumulate == "sharded":  # there is no .grad
            edit, gather = "", False
        if edit in COMPUTED and self.zeros:  # else refused as assigned between two backwards
            edit = "in place"
        self.zeros = self.zeros or zero == "zeros"
        if edit and self.start.dtype != FP32:  # bf16 cannot represent halves of halves
            backwards = backwards[:1]
        self.act(Side.train, backwards, zero, clips, edit, by_closure, gather, look)
        self.dropped = False

    @rule(seed=st.integers(0, 50), use=per_rank, zero=zeros, clips=clips, look=looks)
    def gradients_by_hand_and_a_step(
        self, seed: int, use: Any, zero: str, clips: Any, look: bool
    ) -> None:
        self.act(Side.set_by_hand, seed, use)
        self.zeros = self.zeros or zero == "zeros"
        self.act(Side.train, [], zero, clips, "", False, False, look)

    @rule(seeds=several, use=shared, quiet=st.booleans(), zero=zeros)
    def throw_backwards_away(self, seeds: list[int], use: Any, quiet: bool, zero: str) -> None:
        self.act(Side.throw_away, [(seed, use, quiet, "") for seed in seeds], zero)
        self.zeros = self.zeros or zero == "zeros"
        self.dropped = True

    @rule(number=st.sampled_from([n for n in NUMBERS if n != 1]), frozen=st.booleans())
    def freeze_or_unfreeze(self, number: int, frozen: bool) -> None:
        self.act(Side.freeze, number, frozen)

    @rule()
    def add_a_group(self) -> None:
        """Add a group without earlier gradients, which would raise if ranks had different ones."""
        self.act(Side.clear, "model")
        self.act(Side.extend)

    @rule(place=places, number=st.integers(0, 5))
    def change_an_option(self, place: int, number: int) -> None:
        self.act(Side.change, place, number)

    @rule(place=places, norm=st.sampled_from([None, 0.25, 2.0]))
    def bound_a_group(self, place: int, norm: float | None) -> None:
        self.act(Side.bound_group, place, norm)

    @rule(number=st.sampled_from(NUMBERS), seed=st.integers(0, 50))
    def write_a_weight(self, number: int, seed: int) -> None:
        """Skip this with split masters, which keep their low bits."""
        if self.start.option("master") == "fp32":
            self.act(Side.write, number, seed)

    @rule(rank=st.integers(0, 3))
    def skip_a_step(self, rank: int) -> None:
        self.act(Side.overflow, rank)
        self.act(Side.look)

    @rule()
    def close_and_begin_anew(self) -> None:
        self.act(Side.close_and_begin_anew)
        self.dropped = False

    @rule(
        by=st.sampled_from(["local", "plain", "dcp", "checkpoint"]),
        early=st.booleans(),
        interval=st.sampled_from([1, 2, 3]),
        size=sizes,
    )
    def go_on_in_another_world(self, by: str, early: bool, interval: int, size: int) -> None:
        self.act(Side.clear, "model")  # also those in no group; a new model has none
        if by == "plain" and self.start.option("master") != "fp32":  # plain writes all weights
            by = "dcp"
        same = by == "local"  # a rank's part needs an identical layout
        self.worlds.append((self.size, self.actions, Way(by, early and not same, interval)))
        self.size, self.actions = self.size if same else size, []
        self.dropped = False

    def teardown(self) -> None:
        self.worlds.append((self.size, self.actions, Way()))
        note(f"STORIES_SEED={SEED}")
        plain, saved = Side(self.start, self.size), list[Any]()
        way = Way()
        with tempfile.TemporaryDirectory() as folder:
            for size, actions, next_way in self.worlds:
                plain.ranks, built = size, plain.built(way)
                plain.note_way(way)
                play(plain, actions)
                world = ThreadedWorld(size)
                results = world.run(self.on_rank, built, way, actions, saved, next_way, folder)
                assert_same_sequence(world.logs)
                for seen, _ in results:
                    assert_equal(seen, plain.seen)
                for theirs, *ranks in zip(plain.seen, *(seen for seen, _ in results), strict=True):
                    missing = theirs.starts.keys() - {n for mine in ranks for n in mine.starts}
                    assert not missing, (theirs.what, missing)
                way = next_way
                mine = [state for _, state in results]
                saved = mine if way.by == "local" else mine[:1] * 4

    def on_rank(
        self,
        group: Any,
        built: Any,
        way: Way,
        actions: list[Action],
        saved: list[Any],
        next_way: Way,
        folder: str,
    ) -> tuple[list[Seen], dict[str, Any]]:
        side = Side(self.start, group.size(), group, **built(), interval=way.interval)
        if saved:
            side.load(copy.deepcopy(saved[group.rank()]), way, folder)
        play(side, actions)
        return side.seen, side.save(next_way, folder)


def assert_equal(seen: list[Seen], expected: list[Seen]) -> None:
    for step, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
        assert mine.what == theirs.what, step
        for name, value in mine.values.items():
            if mine.what == "norms":  # also of frozen parameters packed with trained ones
                other = theirs.values.get(name, value)
                close = torch.allclose(value, other, rtol=1e-4, atol=1e-6)
                assert close, (step, mine.what, name, value.tolist(), other.tolist())
                continue
            other = theirs.values[name]
            if name in mine.starts:
                start = mine.starts[name]
                other = other.reshape(-1)[start : start + value.numel()]
            assert torch.equal(value, other), (step, mine.what, name)


def play(side: Side, actions: list[Action]) -> None:
    for method, args in actions:
        method(side, *args)


def run_machine(partition: str, examples: int, *, accumulate: str = "local") -> None:
    machine = type("Machine", (Interleavings,), {"partition": partition, "accumulate": accumulate})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=12,
        deadline=None,
        derandomize=not SEED,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(seed(SEED)(machine) if SEED else machine, settings=chosen)


@pytest.mark.filterwarnings(
    "ignore:step skipped", "ignore:gradients were", "ignore:state_dict. this"
)
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_random_interleavings_with_backwards_equal_plain_torch_to_the_bit(
    partition: str, accumulate: str
):
    run_machine(partition, 15, accumulate=accumulate)
