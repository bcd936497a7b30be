"""Gradients on their way to the owner, from real backward passes, against plain torch.

Most are multiples of 1/64, other ones on each rank, so that their sums and means (of 1, 2 or 4
ranks) are exact whatever the order, and parameters must be equal to the bit. STORIES_SEED, a
number, draws other random sequences, as CI does each week.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, run_world, sharded, values
from pairwise import SEED, pairwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.testing import SpawnedWorld

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*this clip is lost"),
]
COUNT = 5  # parameters of a model
Use = frozenset[int]  # the parameters that a backward reaches
Uses = tuple[Use, ...]  # by rank; a rank without any runs no backward
Action = tuple[Callable[..., None], tuple[Any, ...]]  # a method of Side, and its arguments
KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2),
}


class BoomError(Exception):
    """A backward that fails on every rank."""


class Give(torch.autograd.Function):
    """Passes ``x`` on and gives the parameter just this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.saved_tensors[0], None


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise BoomError


class Chain(nn.Module):
    """Gradients come from the last parameter to the first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.all = nn.ParameterList(torch.randn(3 + n, generator=make) for n in range(COUNT))

    def forward(
        self, x: Tensor, grads: dict[int, Tensor], fails_at: int = -1, nests: bool = False
    ) -> Tensor:
        for number, grad in grads.items():
            if number == fails_at:
                x = Fail.apply(x)
            operands = x, self.all[number], grad
            x = (
                Give.apply(*operands)
                if not nests
                else checkpoint(Give.apply, *operands, use_reentrant=True)
            )
        return x


class Side:
    """One rank with two models or, without a group, plain torch with what all ranks have."""

    def __init__(self, ranks: int, kind: str, group: Any = None, **fields: Any) -> None:
        self.ranks, self.group = ranks, group
        self.models = self.model(0), self.model(1)
        self.optimizers = [self.optimizer(model, kind, fields) for model in self.models]
        self.seen: list[Any] = []

    def model(self, seed: int) -> Any:
        return Chain(seed)

    def optimizer(self, model: Any, kind: str, fields: dict[str, Any]) -> Any:
        build = KINDS[kind]
        return build(model) if self.group is None else sharded(model, self.group, build, **fields)

    def look(self, model: Any, _optimizer: Any) -> dict[Any, Tensor]:
        return values(model)

    def rest(self, _optimizer: Any) -> None:
        """Whatever may be done once gradients are cleared."""

    def backward(self, seed: int, uses: Uses, quiet: bool = False, **how: Any) -> None:
        for rank in self.here():
            with self.optimizers[0].no_sync() if quiet and self.group else contextlib.nullcontext():
                x = torch.zeros((), requires_grad=True)
                loss = self.models[0](x, self.gradients(seed + rank, uses[rank]), **how)
                if loss is not x:
                    with contextlib.suppress(BoomError):
                        loss.backward()

    def here(self) -> list[int]:
        return list(range(self.ranks)) if self.group is None else [self.group.rank()]

    def gradients(self, seed: int, use: Use) -> dict[int, Tensor]:
        make, share = torch.Generator().manual_seed(seed), len(self.here())
        every = [torch.randint(-64, 65, (3 + n,), generator=make) / 64 for n in range(COUNT)]
        return {n: every[n] / share for n in sorted(use)}

    def nested(self, seed: int, uses: Uses) -> None:
        self.backward(seed, uses, nests=True)

    def failed(self, seed: int, uses: Uses, fails_at: int) -> None:
        """On all ranks, which must use the same parameters, at the same place."""
        self.backward(seed, uses, fails_at=fails_at)

    def hook_fails(self, seed: int, uses: Uses, fails_at: int, quiet: bool = False) -> None:
        """A hook of the script raises before a gradient is accumulated, on all ranks."""

        def fail(_grad: Tensor) -> None:
            raise BoomError

        handle = self.models[0].all[fails_at].register_hook(fail)
        self.backward(seed, uses, quiet)
        handle.remove()

    def through_both(self, seed: int, uses: Uses) -> None:
        for rank in self.here():
            x = torch.zeros((), requires_grad=True)
            for number, model in enumerate(self.models):
                x = model(x, self.gradients(seed + rank + 10 * number, uses[rank]))
            x.backward()

    def clear(self, how: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if how == "model":
                model.zero_grad()
            elif how != "never":
                optimizer.zero_grad(set_to_none=how == "none")
            if how == "none":
                self.rest(optimizer)

    def clear_one(self) -> None:
        self.models[0].all[3].grad = None

    def clip(self) -> None:
        params = list(self.models[0].parameters())
        if self.group is None:
            self.seen.append(nn.utils.clip_grad_norm_(params, 1e30))
        else:
            self.seen.append(self.optimizers[0].clip_grad_norm_(1e30))

    def step(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.step()
            self.seen.append(self.look(model, optimizer))


def play(side: Side, actions: list[Action]) -> list[Any]:
    for method, arguments in actions:
        method(side, *arguments)
    return side.seen


QUIET = "inside no_sync"  # the error of a quiet backward upon means


def told(side: Side, actions: list[Action]) -> list[Any] | int:
    """What was seen; or which action a rank refused, for a quiet backward upon means."""
    for number, (method, arguments) in enumerate(actions):
        try:
            method(side, *arguments)
        except RuntimeError as error:
            if QUIET not in str(error):
                raise
            return number
    return side.seen


def refused(actions: list[Action], size: int, accumulate: str) -> tuple[list[int], int | None]:
    """Which actions may be refused for a quiet backward upon means, and which one is if none was.

    After a backward that failed some packs have means and some have not, and of those that have
    some parameters have gradients of this rank, which others may be added to. After a clip without
    a backward there are means, of zeros, unless earlier ones were cleared.
    """
    maybe: list[int] = []
    fresh = quiet = sure = unsure = False  # means of this step; a quiet backward upon some
    for number, (method, arguments) in enumerate(actions):
        is_quiet = method is Side.backward and len(arguments) > 2 and arguments[2]
        if method is Side.clear:
            if arguments[0] != "never":
                fresh = quiet = sure = unsure = False
        elif is_quiet and accumulate == "local" and size > 1:
            if any(arguments[1]) and fresh:
                quiet, sure = True, sure or not unsure
        elif method in (Side.step, Side.clip):
            if sure:
                return maybe, number
            maybe += [number] * quiet
            quiet = sure = False
            fresh, unsure = method is Side.clip, not fresh
        elif method is not Side.clear_one:
            fresh, unsure = True, method in (Side.failed, Side.hook_fails)
    return maybe, None


def compare(actions: list[Action], size: int, kind: str = "sgd", **fields: Any) -> None:
    """Every rank has seen what plain torch has: parameters to the bit, norms nearly.

    Or it refuses a quiet backward upon means of the same step, as all ranks do.
    """
    expected = play(Side(size, kind), actions)
    fields = {"pack_params": 2, "accumulate": "local", **fields}
    ranks, _ = run_world(size, lambda group: told(Side(size, kind, group, **fields), actions))
    maybe, surely = refused(actions, size, fields["accumulate"])
    if surely is not None or isinstance(ranks[0], int):
        assert ranks == [ranks[0]] * size and ranks[0] in (*maybe, surely)
        return
    for seen in ranks:
        for mine, plain in zip(seen, expected, strict=True):
            if isinstance(plain, Tensor):
                torch.testing.assert_close(mine, plain, rtol=1e-6, atol=0)
            else:
                assert_same_bits(mine, plain)


EVERY, NONE = frozenset(range(COUNT)), frozenset[int]()
ALL = (EVERY,) * 4


def use(*numbers: int) -> Use:
    return frozenset(numbers)


APART = (use(0, 2, 4), use(1, 2, 3))

# Of each step the backwards, of each backward what every rank uses.
PATTERNS: dict[str, list[list[Uses]]] = {
    "all present": [[ALL[:2]]] * 3,
    "absent everywhere": [[(use(0, 1), use(0, 1))]] * 3,
    "on one rank only": [[(use(0, 1, 3), EVERY)]] * 3,
    "on the other rank only": [[(EVERY, use(1))]] * 3,
    "nothing in common": [[(use(0, 2), use(1, 3, 4))]] * 3,
    "one rank without any": [[(EVERY, NONE)]] * 3,
    "the first rank without any": [[(NONE, use(1, 2))]] * 3,
    "in some steps": [[ALL[:2]], [(use(1), use(1, 2))], [ALL[:2]], [(use(0), use(3))]],
    "late start": [[(use(0), use(0))], [(use(0), use(0, 2))], [ALL[:2]], [ALL[:2]]],
    "no rank in one step": [[ALL[:2]], [(NONE, NONE)], [ALL[:2]]],
    "four ranks": [[(use(0), use(1), use(0, 2), EVERY)]] * 3,
    "several backwards": [[ALL[:2]] * 3] * 3,
    "absent later": [[ALL[:2], (use(0), use(0))]] * 2,
    "never on one rank": [[(use(0), EVERY), (use(0), EVERY)]] * 2,
    "here and there": [[(use(1), use(3)), (use(2), use(0, 3))]] * 2,
}


CLEARS = ["none", "zeros", "model", "never"]


@pytest.mark.parametrize(("name", "clear"), pairwise(PATTERNS, CLEARS))
def test_absent_gradients_count_as_torch_counts_them_however_they_are_cleared(
    name: str, clear: str
):
    """Every pattern, and every way to clear, meets every kind of optimizer."""
    steps = PATTERNS[name]
    kinds = ("adamw", "even"), ("sgd", "whole"), ("rmsprop", "whole")
    kind, partition = kinds[([*PATTERNS].index(name) + CLEARS.index(clear)) % len(kinds)]
    for is_quiet in (False, True)[: len(steps[0])]:  # all but the last in no_sync()
        actions: list[Action] = []
        for number, backwards in enumerate(steps):
            for micro, uses in enumerate(backwards, 1):
                quiet = is_quiet and micro < len(backwards)
                actions.append((Side.backward, (100 * number + 10 * micro, uses, quiet)))
            actions += [(Side.step, ()), (Side.clear, (clear,))]
        compare(actions, len(steps[0][0]), kind, partition=partition)


FIRST: Action = (Side.backward, (0, ALL[:2]))
LAST: list[Action] = [(Side.backward, (2, APART)), (Side.step, ())]
SEQUENCES: dict[str, list[Action]] = {
    "a step twice": [(Side.backward, (0, APART)), (Side.step, ()), (Side.step, ())],
    **{
        f"{begun} upon {name}, cleared": [
            (Side.backward, (0, uses)),
            action,
            (Side.clear, ("model",)),
            *LAST,
        ]
        for name, uses in (("all", ALL[:2]), ("some", APART))
        for begun, action in (
            ("quiet", (Side.backward, (1, ALL[:2], True))),
            ("failed", (Side.failed, (1, ALL[:2], 1))),
        )
    },
    "failed upon clipped means": [FIRST, (Side.clip, ()), (Side.failed, (1, ALL[:2], 4)), *LAST],
    "ten backwards, of which one is reduced": [
        *((Side.backward, (seed, ALL[:2], True)) for seed in range(9)),
        FIRST,
        (Side.step, ()),
    ],
    "failed after some packs were sent, cleared, and stepped": [
        FIRST,
        (Side.failed, (1, ALL[:2], 0)),
        (Side.clear, ("model",)),
        (Side.step, ()),
        *LAST,
    ],
    "failed after some packs were sent, one cleared": [
        FIRST,
        (Side.failed, (1, ALL[:2], 0)),
        (Side.clear_one, ()),
        (Side.clip, ()),
        *LAST,
    ],
    **{
        f"{begun} upon used ones, cleared": [
            FIRST,
            (Side.step, ()),
            action,
            (Side.clear, ("model",)),
            *LAST,
        ]
        for begun, action in (
            ("quiet", (Side.backward, (1, ALL[:2], True))),
            ("failed", (Side.failed, (1, ALL[:2], 1))),
        )
    },
    "quiet upon all, cleared, quiet upon some": [
        FIRST,
        (Side.backward, (1, ALL[:2], True)),
        (Side.clear, ("none",)),
        (Side.backward, (2, APART, True)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ],
    "zeroed after one that failed where another rank's had been used": [
        (Side.backward, (0, (use(3), use(4)))),
        (Side.step, ()),
        (Side.failed, (1, (use(0, 4), use(0, 2, 4)), 0)),
        (Side.clear, ("zeros",)),
        (Side.backward, (2, (use(3), use(4)))),
        (Side.step, ()),
    ],
    "two that fail upon means, the second one before it comes as far": [
        (Side.backward, (0, (EVERY, EVERY - {0}))),
        (Side.failed, (1, ALL[:2], 0)),
        (Side.failed, (2, ALL[:2], 2)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ],
    **{
        f"a hook fails at {number} upon means, cleared: {bool(clear)}": [
            FIRST,
            (Side.hook_fails, (1, ALL[:2], number)),
            *clear,
            *LAST,
        ]
        for number in (0, 3, 4)
        for clear in ([], [(Side.clear, ("model",))])
    },
    "a hook fails, and the step follows": [
        FIRST,
        (Side.hook_fails, (1, ALL[:2], 4)),
        (Side.step, ()),
        (Side.step, ()),
        *LAST,
    ],
    "a hook fails upon used means": [
        FIRST,
        (Side.step, ()),
        (Side.hook_fails, (1, ALL[:2], 2)),
        *LAST,
    ],
    **{
        f"one cleared after the last, quiet: {quiet}": [
            FIRST,
            (Side.backward, (1, ALL[:2], quiet)),
            (Side.clear_one, ()),
            (Side.step, ()),
            (Side.step, ()),
        ]
        for quiet in (False, True)
    },
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_means_that_are_begun_upon_or_cleared_count_as_in_plain_torch(name: str):
    compare(SEQUENCES[name], 2)
    compare(SEQUENCES[name], 2, accumulate="sharded")


def test_a_complete_pack_is_sent_by_the_next_gradient_of_whichever_pack():
    """Two groups with other flags, so that parameters lie in the two packs by turns; the last pack
    is sent first."""

    def run(group: Any) -> list[tuple[int, int]]:
        model = nn.ParameterList(torch.ones(4) for _ in range(8))
        groups = [{"params": [*model][::2]}, {"params": [*model][1::2], "foreach": False}]
        optimizer: Any = shardcast.shard(
            model, torch.optim.SGD(groups, lr=0.1, weight_decay=0.1), process_group=group
        )
        sent: list[tuple[int, int]] = []
        for number, param in enumerate(model):
            param.register_post_accumulate_grad_hook(
                lambda _param, number=number: sent.append((number, len(group.log)))
            )
        for _ in range(2):  # the first backward sends at its end
            begun = len(group.log)
            sent.clear()
            x = torch.zeros((), requires_grad=True)
            for param in model:
                x = Give.apply(x, param, torch.ones(4))
            x.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [(number, count - begun) for number, count in sent]

    expected = [(number, 0) for number in range(7, 0, -1)] + [(0, 1)]
    assert run_world(2, run)[0] == [expected] * 2


def random_sequence(draw: random.Random) -> list[Action]:
    """No backward fails after nested ones with other parameters on each rank.

    A rank knows of itself alone which packs wait for the end of a backward since then, so that
    ranks may have sent other packs when it fails.
    """
    actions: list[Action] = []
    clipped = False  # then gradients are only cleared by the optimizer, else the step is refused
    rare = draw.random() < 0.5  # what defers launches for good comes late or never
    for number in range(draw.randint(4, 14)):
        seed = draw.randrange(1000)
        uses = tuple(
            frozenset(n for n in range(COUNT) if draw.random() < 0.7) | {2} for _ in range(4)
        )
        kinds = ["backward", "quiet", "step", "step", "clear", "clip"]
        if not any(method is Side.nested for method, _ in actions):
            kinds += ["failed", "hook_fails"]
        if not rare or number > 6:
            kinds += ["nested", "through_both"]
        kind = draw.choice(kinds)
        if kind == "quiet":
            actions.append((Side.backward, (seed, uses, True)))
        elif kind in ("failed", "hook_fails"):
            actions.append(
                (getattr(Side, kind), (seed, uses[:1] * 4, draw.choice(sorted(uses[0]))))
            )
        elif kind == "clear":
            how = ["none", "zeros"] if clipped else ["none", "zeros", "model"]
            actions.append((Side.clear, (draw.choice(how),)))
        else:
            arguments = () if kind in ("step", "clip") else (seed, uses)
            actions.append((getattr(Side, kind), arguments))
        clipped = kind == "clip" or (clipped and kind not in ("step", "clear"))
    return [*actions, (Side.step, ())]


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_random_sequences_of_backwards_clears_and_steps_equal_plain_torch(accumulate: str):
    for number in range(25):
        draw = random.Random(1_000_003 * SEED + number)
        actions, size = random_sequence(draw), draw.choice([1, 2, 2, 4])
        kind, partition = draw.choice(["sgd", "adamw"]), draw.choice(["even", "whole"])
        pack_params = draw.choice([1, 2, 2, None])
        try:
            compare(
                actions,
                size,
                kind,
                accumulate=accumulate,
                partition=partition,
                pack_params=pack_params,
            )
        except BaseException:
            print(f"STORIES_SEED={SEED}, sequence {number}")
            raise


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_clearing_one_gradient_between_two_backwards_of_a_step_drops_its_mean_alone(
    accumulate: str,
):
    actions: list[Action] = [
        (Side.backward, (0, ALL[:2])),
        (Side.clear_one, ()),
        (Side.backward, (1, APART)),
        (Side.clip, ()),
        (Side.step, ()),
    ]
    compare(actions, 2, accumulate=accumulate)


def test_clearing_one_gradient_between_two_backwards_on_one_rank_alone_is_an_error_on_all():
    def run(group: Any) -> None:
        side = Side(2, "sgd", group, pack_params=2)
        side.backward(0, ALL)
        if group.rank() == 1:
            side.clear_one()
        side.backward(1, ALL)
        with pytest.raises(RuntimeError, match=r"cleared between .* rank 1: 'all.3'"):
            side.step()
        side.optimizers[0].zero_grad()
        side.backward(1, ALL)
        side.clear_one()  # of the next step, and not between its backwards
        side.step()

    run_world(2, run)


@pytest.mark.parametrize("cleared", [range(COUNT), (1,), (4,), (0, 1), (1, 3, 4)])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_a_cleared_mean_is_in_no_norm_whether_or_not_its_owner_had_a_gradient(
    accumulate: str, cleared: Sequence[int]
):
    """Of 1 and of 4 one rank alone had a gradient; each of two ranks owns a part of a pack."""

    def clear(side: Side) -> None:
        for position in cleared:
            side.models[0].all[position].grad = None

    uses = (use(0, 1, 2, 3), use(0, 2, 3, 4))
    for quiet in (False, True):
        actions: list[Action] = [
            (Side.backward, (825, ALL[:2])),
            (Side.step, ()),
            (Side.clear, ("none",)),
            (Side.backward, (439, uses, quiet)),
            (clear, ()),
            (Side.clip, ()),
            (Side.step, ()),
        ]
        compare(actions, 2, accumulate=accumulate)


# -- real models ----------------------------------------------------------------------------------


def train_on_part(group: Any, case: str, micros: int) -> dict[str, Tensor]:
    """Three steps; each rank takes its part of the batch of 12, in ``micros`` pieces."""
    torch.set_num_threads(1)
    model = CASES[case].build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, size = 0, 1
    if group is not None:
        rank, size = group.rank(), group.size()
        optimizer = shardcast.shard(
            model, optimizer, process_group=group, param_dtype="fp32", pack_params=4
        )
    for step in range(3):
        x, y = (whole.chunk(size)[rank] for whole in CASES[case].batch(step, 12))
        for number, part in enumerate(zip(x.chunk(micros), y.chunk(micros), strict=True), 1):
            with optimizer.no_sync() if number < micros else contextlib.nullcontext():
                (CASES[case].loss(model, part) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def assert_as_plain(ranks: list[dict[str, Tensor]], case: str) -> None:
    """A gradient is a sum over 12 x 9 tokens in another order: below 1, so each differs by less
    than 2^-23 times a few; three steps of 0.1 with momentum weigh 0.1 x (1 + 1.9 + 2.7)."""
    expected = train_on_part(None, case, 1)
    for mine in ranks:
        assert_same_bits(mine, ranks[0])
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2**-21)


@pytest.mark.parametrize(
    ("case", "how"),
    pairwise(
        ("mlp", "gpt", "gpt_reentrant", "gpt_nonreentrant", "tied_reentrant"),
        ((1, 3), (2, 1), (4, 3), (2, 3)),
    ),
)
def test_ranks_with_parts_of_a_batch_equal_plain_training_on_the_whole(
    case: str, how: tuple[int, int]
):
    size, micros = how
    assert_as_plain(run_world(size, train_on_part, case, micros)[0], case)


def test_two_gloo_processes_with_halves_of_a_batch_equal_plain_training(gloo: SpawnedWorld):
    assert_as_plain(gloo.run(train_on_part, "gpt_reentrant", 3), "gpt_reentrant")


def zero_what_was_sent(group: Any) -> list[dict[str, Tensor]]:
    """After a backward that fails by its last gradient, when those of other packs are under way."""
    side = Side(2, "sgd", group, pack_params=1)
    side.backward(0, ALL[:2])
    side.step()
    side.clear("none")
    side.failed(1, ALL[:2], 0)
    with pytest.raises(RuntimeError, match=r"\.grad of 'all\.[12]' .* zeroed in place"):
        side.models[0].zero_grad(set_to_none=False)
    side.clear("none")
    side.backward(3, ALL[:2])
    side.step()
    return [values(model) for model in side.models]


def test_gradients_that_are_zeroed_on_their_way_are_told_of_and_training_goes_on(
    gloo: SpawnedWorld,
):
    actions: list[Action] = [
        (Side.backward, (0, ALL[:2])),
        (Side.step, ()),
        (Side.clear, ("none",)),
        (Side.backward, (3, ALL[:2])),
        (Side.step, ()),
    ]
    expected = play(Side(2, "sgd"), actions)[-2:]
    for models in gloo.run(zero_what_was_sent):
        for params, plain in zip(models, expected, strict=True):
            assert_same_bits(params, plain)
