"""A training script in single actions, on a rank of shardcast or in plain torch.

Gradients come from real backward passes, differ between ranks, and are small multiples of 1/64. So
sums and means over 1, 2 or 4 ranks, their halves and their clamped values are exact in their dtype.
Parameters, masters, averages and loss scales must be bitwise equal. Norms of ``metrics`` need not
be: they are summed in another order.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardcast
from shardcast import checkpoint
from shardcast.optimizer.sharded import packed_of

SHAPES = ((5, 3), (7,), (), (2, 9), (11,), (4, 4))
NUMBERS = range(len(SHAPES))
LAST = (4, 5)  # are added later, in their own group
KINDS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {  # and later options
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1},
        [{"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"maximize": True}],
    ),
    "SGD": (
        torch.optim.SGD,
        {"lr": 0.1, "dampening": 0.25},
        [
            {"momentum": 0.9},
            {"momentum": 0.0},
            {"weight_decay": 0.01},
            {"maximize": True},
            {"momentum": 0.5, "nesterov": True, "dampening": 0.0},
        ],
    ),
    "NAdam": (
        torch.optim.NAdam,
        {"lr": 1e-2},
        [{"betas": (0.5, 0.9)}, {"decoupled_weight_decay": True}, {"weight_decay": 0.1}],
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 1e-2, "momentum": 0.5},
        [{"momentum": 0.9}, {"alpha": 0.5}, {"eps": 1e-3}],
    ),
}
if torch.__version__ >= (2, 13):  # older ones make no state for added groups
    KINDS["Adagrad"] = torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}, []
SCALE = 4.0  # the first loss scale of fp16
AVERAGES = {"ema": 0.75, "warm": {"decay": 0.875, "warmup": True}}
NORMS = ("grad_norm", "weight_norm", "update_norm")


class Dots(nn.Module):
    """Its loss has exactly the requested gradients; parameters not in ``use`` get none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, seed: int, use: frozenset[int], bound: int) -> Tensor | None:
        terms = [
            (self.all[number] * gradient(seed, number, bound)).sum()
            for number in sorted(use)
            if self.all[number].requires_grad
        ]
        return torch.stack(terms).sum() if terms else None


def gradient(seed: int, number: int, bound: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-bound, bound + 1, SHAPES[number], generator=generator) / 64


class Start(NamedTuple):
    """The optimizer class and the options of a training run.

    Attributes:
        frozen: the number of a parameter that is frozen before ``shard()``.
        several: use two optimizers, with two groups and one, and step their handles.
        dtype: dtype of the parameters; gradients are small enough to be exact in it.
    """

    kind: str = "AdamW"
    max_grad_norm: float | None = None
    frozen: int | None = None
    several: bool = False
    dtype: torch.dtype = torch.float32
    fields: Any = ()

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.fields).get(name, default)


class Way(NamedTuple):
    """How a training run continues in another world.

    Attributes:
        by: the kind of state that is loaded; ``""`` if the run ends.
        early: freeze layers that are frozen now before ``shard()``, and pass it all added groups.
        interval: the new ``loss_scale_growth_interval``.
    """

    by: str = ""
    early: bool = False
    interval: int = 2


class Seen(NamedTuple):
    """Values that a script records, by parameter name; those in ``starts`` are flat parts.

    For plain torch, ``starts`` names the parameters that some rank must own a part of.
    """

    what: str
    values: dict[str, Tensor]
    starts: dict[str, int] = {}  # noqa: RUF012


class Side:
    """One rank or, without a group, plain torch, which sums the gradients of all ``ranks``."""

    def __init__(
        self,
        start: Start,
        ranks: int,
        group: Any = None,
        interval: int = 2,
        frozen: Sequence[bool] | None = None,
        extended: bool = False,
        then: Sequence[tuple[Sequence[bool], bool]] = (),
    ) -> None:
        """:meth:`built` returns the last three arguments if this side continues another one."""
        self.model, self.start, self.ranks, self.group = Dots(), start, ranks, group
        self.bound = 128 if start.dtype == torch.float32 else 8
        for number in NUMBERS:
            self.freeze(number, number == start.frozen if frozen is None else frozen[number])
        # With several optimizers, each trained parameter must be in one of them.
        self.interval, self.extended = interval, extended or start.several
        members = [(3, 1), (), (0, 2), *([LAST] if self.extended else [])]
        groups: list[dict[str, Any]] = [
            {"params": [self.model.all[number] for number in numbers]} for numbers in members
        ]
        groups[0]["lr"] = 3e-3
        self.seen: list[Seen] = []
        self.dropped = False  # whether gradients were thrown away since the last step
        self.frozen_when_extended: list[bool] | None = None
        self.begin(groups)
        for flags, extends in then:
            for number, is_frozen in enumerate(flags):
                self.freeze(number, is_frozen)
            if extends:
                self.extend()

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """Make a new optimizer for the given groups."""
        make, options, _ = KINDS[self.start.kind]
        lists = [groups[:2], groups[2:]] if self.start.several else [groups]
        self.optimizers: list[Any] = [make(each, **options) for each in lists]
        self.when_begun = self.frozen(), self.extended
        self.untouched = self.untrained()
        self.averages: dict[str, dict[int, Tensor]] = {name: {} for name in AVERAGES}
        self.steps = 0  # not counting skipped ones; for averages
        self.scale, self.good = SCALE, 0
        self.norms: dict[str, tuple[float, ...]] = {}
        # Parameters with state count as trained; Adagrad's constructor makes state for all.
        made = self.start.kind == "Adagrad"
        self.active = {n for n in NUMBERS if made or self.model.all[n].requires_grad}
        if self.group is None:
            return
        fields = dict(self.start.fields)
        if self.start.dtype == torch.float16:
            fields |= {"loss_scale_init": SCALE, "loss_scale_growth_interval": self.interval}
        self.sharded = shardcast.shard(
            self.model,
            self.optimizers,
            process_group=self.group,
            param_dtype=self.start.dtype,
            fuse="eager",
            max_grad_norm=self.start.max_grad_norm,
            **fields,
        )
        self.optimizers = [*self.sharded.optimizers]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def trained(self) -> list[int]:
        """Return the parameters held by an optimizer."""
        held = {param for group in self.groups for param in group["params"]}
        return [number for number in NUMBERS if self.model.all[number] in held]

    def low(self, number: int) -> torch.dtype:
        """Return a parameter's dtype; scalars and initially untrained parameters stay in fp32."""
        is_low = SHAPES[number] and number not in self.untouched
        return self.start.dtype if is_low else torch.float32

    def untrained(self) -> set[int]:
        """Return the parameters that are frozen now or in no group."""
        trained = [n for n in NUMBERS if self.extended or n not in LAST]
        return {n for n in NUMBERS if n not in trained or not self.model.all[n].requires_grad}

    def has_state(self, number: int) -> bool:
        """Return whether torch or an average has state of a parameter; then DCP has its master."""
        param, averages = self.model.all[number], self.start.option("averages")
        own = any(optimizer.state.get(param) for optimizer in self.optimizers)
        return own or bool(averages and number in self.averages["ema"])

    # -- a step -----------------------------------------------------------------------------

    def train(
        self,
        backwards: list[tuple[Any, ...]],
        zero: str,
        clips: tuple[tuple[str, float], ...],
        edit: str = "",
        by_closure: bool = False,
        gather: bool = False,
        look: bool = True,
    ) -> None:
        def closure() -> float:
            for backward in backwards:
                self.backward(*backward)
                is_quiet = backward[2]
                if edit in COMPUTED and self.group is not None and not is_quiet:
                    self.sharded.gather_gradients()
                for param in self.model.all:
                    if edit and param.grad is not None:
                        EDITS[edit](param)
            if gather:
                if self.group is not None:
                    self.sharded.gather_gradients()
                scale = 1.0 if self.group is None else self.current_scale()
                grads = {f"all.{n}": self.model.all[n].grad for n in self.trained()}
                found = {name: g.float() / scale for name, g in grads.items() if g is not None}
                self.seen.append(Seen("gradients", found))
            for clip in clips:
                self.clip(*clip)
            if self.group is None and not any(kind == "norm" for kind, _ in clips):
                self.clip("norm", self.start.max_grad_norm)
            return 1.5

        self.step(closure, by_closure)
        self.clear(zero)
        if look:
            self.look()

    def step(self, closure: Any = None, by_closure: bool = False) -> None:
        if self.group is None:
            before = {n: self.model.all[n].detach().clone() for n in NUMBERS}
            if closure is not None:
                closure()
            for optimizer in self.optimizers:
                optimizer.step()
            self.note(before)
        elif closure is not None and by_closure:
            assert self.sharded.step(closure) == 1.5
        else:
            if closure is not None:
                closure()
            for optimizer in self.optimizers:
                optimizer.step()
        self.dropped = False

    def look(self) -> None:
        """Record parameters, masters, averages, the loss scale and norms."""
        low = self.start.dtype
        if self.group is not None:
            self.sharded.wait_sync()
        parameters = self.model.named_parameters()
        found = {
            name: param.detach().clone().to(low if param.dim() else torch.float32)
            for name, param in parameters
        }
        self.seen.append(Seen("parameters", found))
        if low == torch.float16:
            self.seen.append(Seen("loss scale", {"": torch.tensor(self.current_scale())}))
        if self.start.option("metrics"):
            if self.group is not None:
                measured = self.sharded.metrics()
                norms = {n: tuple(float(of[k]) for k in NORMS) for n, of in measured.items()}
            else:
                norms = self.norms
            self.seen.append(Seen("norms", {n: torch.tensor(of) for n, of in norms.items()}))
        for average in (None, *self.start.option("averages", ())):
            self.seen.append(Seen(average or "masters", *self.kept(average)))

    def kept(self, average: str | None) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return masters or an average; on a rank its own flat parts, and where they start."""
        values, starts = dict[str, Tensor](), dict[str, int]()
        if self.group is None:
            own = self.averages.get(average or "", {})
            for number in self.trained():
                param = self.model.all[number]
                values[f"all.{number}"] = own.get(number, param.detach()).clone()
                if average is None or (number in own and param.requires_grad):
                    starts[f"all.{number}"] = 0
            return values, starts
        packed = packed_of(self.sharded)
        packed.ready_to_read()
        for shard in packed.shards:
            for number, fragment, _ in shard.owned():
                state = packed.update_of(shard).fragment_state(shard, number)
                value = state.get(f"average.{average}") if average else shard.exact(fragment)
                if value is not None:  # frozen parameters have no average
                    name = fragment.slot.name
                    values[name], starts[name] = value.clone().reshape(-1), fragment.param_range[0]
        return values, starts

    def note(self, before: dict[int, Tensor]) -> None:
        """Update loss scale, averages and norms of plain torch after a step that is not skipped."""
        self.steps += 1
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = 2 * self.scale, 0
        grads = {n: self.model.all[n].grad for n in NUMBERS}
        trained = self.trained()
        self.active |= {n for n in trained if grads[n] is not None}
        decays = {"ema": 0.75, "warm": min(0.875, (1 + self.steps) / (10 + self.steps))}
        for name, averages in self.averages.items():
            for number in self.active.intersection(trained):
                average = averages.setdefault(number, before[number].clone())
                average.lerp_(self.model.all[number].detach(), 1 - decays[name])
        for number in self.active.intersection(trained):
            grad, new = grads[number], self.model.all[number].detach()
            grad_norm = 0.0 if grad is None else float(grad.double().norm())
            update_norm = float((new - before[number]).double().norm())
            self.norms[f"all.{number}"] = grad_norm, float(new.double().norm()), update_norm

    def current_scale(self) -> float:
        """Return the current loss scale, or 1."""
        if self.start.dtype != torch.float16:
            return 1.0
        return self.scale if self.group is None else float(self.sharded.loss_scale)

    def scaled(self, grad: Tensor) -> Tensor:
        """Return a gradient that is set by hand, scaled as by a backward."""
        return grad if self.group is None else self.sharded.scale_loss(grad.detach())

    def backward(self, seed: int, use: tuple[frozenset[int], ...], quiet: bool, way: str) -> None:
        """Run a backward on rank ``r`` with the parameters ``use[r]``; none if it has no loss."""
        plain = self.group is None
        for rank in range(self.ranks) if plain else [self.group.rank()]:
            loss = self.model(seed + rank, use[rank], self.bound)
            with self.sharded.no_sync() if quiet and not plain else contextlib.nullcontext():
                if loss is not None:
                    loss = loss / self.ranks if plain else self.sharded.scale_loss(loss)
                    inputs = [self.model.all[1]] if way == "inputs" else None
                    if way == "twice":
                        loss.backward(retain_graph=True)
                    loss.backward(inputs=inputs)

    def throw_away(self, backwards: list[tuple[Any, ...]], zero: str) -> None:
        for backward in backwards:
            self.backward(*backward)
        self.clear(zero)
        self.dropped = True

    def without_gradients(self) -> None:
        """Clear gradients, so that those set by hand are averaged; step if some were dropped."""
        self.clear("none")
        if self.dropped:
            self.step()

    def set_by_hand(self, seed: int, use: tuple[frozenset[int], ...]) -> None:
        """Set gradients by hand, after clearing those of earlier backwards."""
        self.without_gradients()
        ranks = range(self.ranks) if self.group is None else [self.group.rank()]
        for rank in ranks:
            for number in sorted(use[rank]):
                param = self.model.all[number]
                if param.requires_grad and number in self.trained():
                    grad = self.scaled(gradient(seed + rank, number, self.bound) / len(ranks))
                    grad = grad.to(param.dtype)
                    param.grad = grad if param.grad is None else param.grad + grad

    def clip(self, kind: str, limit: float | None) -> None:
        """Clip; in plain torch by exact norms, which differ from torch's clip in a last bit."""
        if self.group is not None:
            getattr(self.sharded, f"clip_grad_{kind}_")(limit)
            return
        if kind == "value":
            for group in self.groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.clamp_(-limit, limit)
            return
        bounded: dict[Any, list[Tensor]] = {}  # a group with its own bound has its own entry
        for place, group in enumerate(self.groups):
            own = group.get("max_grad_norm")
            grads = bounded.setdefault((limit, None) if own is None else (own, place), [])
            grads += [param.grad for param in group["params"] if param.grad is not None]
        for (norm, _), grads in bounded.items():
            if norm is not None and grads:
                total = sum(grad.double().square().sum() for grad in grads).sqrt()
                torch._foreach_mul_(grads, (norm / (total + 1e-6)).clamp(max=1.0).float())

    def clear(self, zero: str) -> None:
        if zero == "model":
            self.model.zero_grad()
            return
        if zero == "zeros" and self.group is not None:
            self.sharded.zero_grad(set_to_none=False)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=zero == "none")

    def overflow(self, rank: int) -> None:
        """Run a step with a NaN in one rank's gradient; plain torch skips it."""
        self.without_gradients()
        if self.group is not None:
            param = self.model.all[0]
            grad = self.scaled(torch.zeros_like(param))
            if rank % self.ranks == self.group.rank():
                grad[2, 1] = torch.nan
            param.grad = grad
            self.step()
        else:
            self.scale, self.good = self.scale / 2, 0
            self.active.add(0)
            for number in self.active.intersection(self.trained()):
                self.norms.setdefault(f"all.{number}", (0.0, 0.0, 0.0))
        self.clear("none")

    # -- between steps ----------------------------------------------------------------------

    def extend(self) -> None:
        if not self.extended:
            self.extended, self.frozen_when_extended = True, self.frozen()
            added = [self.model.all[number] for number in LAST]
            self.optimizers[-1].add_param_group({"params": added, "lr": 5e-3})
            self.untouched -= {number for number in LAST if self.model.all[number].requires_grad}

    def change(self, place: int, number: int) -> None:
        group = self.groups[place]
        changes = KINDS[self.start.kind][2]
        if number < len(changes):
            group.update(changes[number])
        else:
            group["lr"] *= 0.75

    def bound_group(self, place: int, norm: float | None) -> None:
        group = self.groups[place]
        group.pop("max_grad_norm", None)
        if norm is not None:
            group["max_grad_norm"] = norm

    def write(self, number: int, seed: int) -> None:
        """Write new values into a weight; elements that show them already keep their masters."""
        param, value = self.model.all[number], gradient(seed, number, self.bound)
        if self.group is not None:
            self.sharded.wait_sync()
        with torch.no_grad():
            if self.group is None:
                value = torch.where(param.to(self.low(number)) == value, param, value)
            param.copy_(value)

    def frozen(self) -> list[bool]:
        return [not param.requires_grad for param in self.model.all]

    def freeze(self, number: int, frozen: bool) -> None:
        self.model.all[number].requires_grad_(not frozen)

    def close_and_begin_anew(self) -> None:
        """Begin a second phase with the same groups; only the masters are kept."""
        groups = [dict(group) for group in self.groups]
        self.model.zero_grad()
        if self.group is not None:
            self.sharded.close()
            found = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        else:
            found = {f"all.{n}": self.model.all[n].detach().clone() for n in NUMBERS}
        self.seen.append(Seen("closed", found))
        self.dropped, self.frozen_when_extended = False, None
        self.begin(groups)

    # -- from one world to the next ---------------------------------------------------------

    def save(self, way: Way, folder: str) -> dict[str, Any]:
        """Return what :meth:`load` needs, or write it to ``folder``."""
        state: Any = None
        if way.by == "checkpoint":
            step = len(os.listdir(folder))
            checkpoint.save(folder, self.model, self.sharded, step=step, digest=True)
        elif way.by == "plain":
            whole = self.sharded.full_state_dicts()
            state = whole[0] if len(whole) == 1 else whole
        elif way.by == "dcp":
            with self.sharded.as_plain():
                state = get_optimizer_state_dict(self.model, self.sharded)
        elif way.by == "local":
            state = self.sharded.state_dict()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"weights": weights, "state": state}

    def load(self, saved: dict[str, Any], way: Way, folder: str) -> None:
        if way.by == "checkpoint":
            checkpoint.load(folder, self.model, self.sharded)
            return
        self.model.load_state_dict(saved["weights"])
        if way.by == "dcp":
            with self.sharded.as_plain():
                # As in plain torch, parameters that had no gradient yet have no state.
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(self.model, self.sharded, saved["state"], options=options)
        else:
            self.sharded.load_state_dict(saved["state"])

    def built(self, way: Way) -> Callable[[], dict[str, Any]]:
        """Return the next side's arguments: parameters frozen and added at ``shard()``, and later.

        With ``early``, all are frozen and added at ``shard()``; otherwise as they were before.
        """
        now = tuple(self.frozen())
        if way.early:
            made = {"frozen": now, "extended": self.extended}
        else:
            frozen, extended = self.when_begun
            at_group = self.frozen_when_extended
            then = [(tuple(at_group), True)] if at_group is not None else []
            made = {"frozen": frozen, "extended": extended, "then": [*then, (now, False)]}
        return lambda: copy.deepcopy(made)

    def note_way(self, way: Way) -> None:
        """In plain torch, which continues, reset what a state of this kind does not keep."""
        self.norms, self.interval, self.seen, self.dropped = {}, way.interval, [], False
        saved = [self.model.all[n].detach().to(self.low(n)) for n in NUMBERS]
        self.when_begun = (self.frozen(), self.extended) if way.early else self.when_begun
        if way.early:
            self.frozen_when_extended = None
            self.untouched = self.untrained()
            for number in NUMBERS:  # without state, it is not active until it is trained
                has_state = self.start.kind == "Adagrad" or number in self.averages["ema"]
                if not (self.model.all[number].requires_grad or has_state):
                    self.active.discard(number)
        if way.by == "dcp" and not any(optimizer.state for optimizer in self.optimizers):
            get_optimizer_state_dict(self.model, self.optimizers)  # creates state, as a step does
        for number in NUMBERS if way.by == "dcp" else ():  # torch loads no state of frozen ones
            if not self.model.all[number].requires_grad:
                for optimizer in self.optimizers:
                    state = optimizer.state.pop(self.model.all[number], None)
                    if state and self.start.kind == "Adagrad":  # reset to its initial state
                        begun = torch.full_like(state["sum"], 0.3)
                        optimizer.state[self.model.all[number]] = {
                            "step": state["step"] * 0,
                            "sum": begun,
                        }
                for averages in self.averages.values():
                    averages.pop(number, None)
        if way.by in ("plain", "dcp"):
            self.scale, self.good = SCALE, 0
        # If no masters are loaded, those of the new model stay unless their cast differs.
        for number, param in enumerate(Dots().all if way.by in ("plain", "dcp") else ()):
            if way.by == "dcp" and self.has_state(number):
                continue
            # A parameter that is frozen now was saved in the dtype in which it was trained.
            own, shown = self.model.all[number], saved[number].to(self.low(number))
            own.data = torch.where(param.to(shown) == shown, param.data, shown.float())


def halve_in_place(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace_by_half(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def give_other_memory(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * 0.5


EDITS = {"in place": halve_in_place, "replaced": replace_by_half, "memory": give_other_memory}
COMPUTED = "replaced", "memory"  # these edits read the mean, which must be gathered first
