"""State that an update keeps for each shard: torch's for its parameters, and the epilogues'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Encoded, moment_codec, row_of
from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.plan.layout import GroupId
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.update.epilogues import AVERAGE, STEPS, Epilogue
from shardcast.step.update.fusion import Fusion
from shardcast.step.update.rules import Rule, as_tensors

Ready = Callable[[Sequence[Pack]], object]  # called with packs that are updated before others


class ShardState:
    """The state of one shard, and the operands of its update.

    Attributes:
        first: index of its first fragment among the fragments of all shards of the update.
        stored: torch's state and the epilogues' by name, parallel to the master; allocated as zeros
            at first use.
    """

    def __init__(
        self, shard: Shard, config: ShardcastConfig, epilogues: tuple[Epilogue, ...], first: int
    ) -> None:
        self.shard, self.first, self._home = shard, first, shard.home
        self.stored: dict[str, Encoded] = {}
        self._config = config
        self._row = row_of(config, shard.pack.layout.dtype)
        self._codecs = {name: e.codec for e in epilogues for name in e.state}
        # Fragments without values yet. An epilogue's start as the masters, a rule's as zeros.
        self._unbegun = {name: {*range(len(shard.fragments))} for name in self._codecs}
        self._keys: Tensor | None = None
        self._epilogues = epilogues
        self._prepared: dict[Rule, Fusion] = {}

    def encoded(self, name: str) -> Encoded:
        """Return one state tensor."""
        if name not in self.stored:
            self._unbegun.setdefault(name, {*range(len(self.shard.fragments))})
            codec = self._codecs.get(name) or moment_codec(self._config, name)
            numel = self.shard.pack.own.numel
            self.stored[name] = Encoded(codec, numel, self._row, self._home.zeros)
        return self.stored[name]

    def begin(self) -> None:
        """Initialize stored tensors of epilogues with the masters, unless they were loaded."""
        for name in self._codecs:
            numbers = self._unbegun[name]
            for number in numbers:
                part = self.part(number)
                for piece in slices(part.stop, start=part.start):
                    self.encoded(name).write(piece, self.shard.shown(piece))
            numbers.clear()

    def part(self, number: int) -> slice:
        """Return one fragment as a slice of the own span."""
        fragment = self.shard.fragments[number]
        return self.shard.local(fragment.start, fragment.stop)

    def prepare(self, rule: Rule) -> Fusion:
        """Return the fusion of ``rule``; allocate what it needs."""
        if (known := self._prepared.get(rule)) is not None:
            return known
        names = (*rule.state, *self._codecs)
        state = tuple(self.encoded(name).codec for name in names)
        master, casts = self.shard.master.codec, self.shard.casts
        fusion = Fusion(rule, master, state, casts, self._row, self._epilogues)
        if fusion.by_chance and self._keys is None:
            rounding = next(codec for codec in state if codec.by_chance)
            self._keys = rounding.row_keys(self.shard, self._row)
        self._prepared[rule] = fusion
        return fusion

    def use(self, numbers: Iterable[int], names: Iterable[str]) -> None:
        """Note that these fragments have a rule's state ``names`` from now on."""
        for name in names:
            self.encoded(name)
            if name in self._unbegun:
                self._unbegun[name].difference_update(numbers)

    def operands(
        self,
        part: slice,
        fusion: Fusion,
        places: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the operands for the update of ``part`` of the own span; see :class:`.Fusion`.

        Args:
            places: see :class:`.NamedOperands`.
        """
        shard = self.shard
        operands = [shard.mean[part]]
        if fusion.casts:
            operands.append(shard.published[part])
        states = [self.stored[name] for name in (*fusion.rule.state, *self._codecs)]
        for encoded in (shard.master, *states):
            operands += encoded.parts(part)
        rows = slice(part.start // fusion.row, -(-part.stop // fusion.row))
        if fusion.by_chance:
            assert self._keys is not None
            operands.append(self._keys[rows])
        if places is not None:
            operands.append(places)
        return operands

    def read(self, number: int, names: Sequence[str], decode: bool) -> dict[str, Tensor]:
        """Return stored tensors of one fragment that have values, 1-d fp32.

        Decoded values are inference tensors, so torch refuses in-place edits, which would have no
        effect.

        Args:
            decode: if false, return tensors on the meta device, to count them.
        """
        part = self.part(number)
        unread = torch.empty(part.stop - part.start, dtype=MASTER_DTYPE, device="meta")
        values = {}
        for name in names:
            if name in self.stored and number not in self._unbegun.get(name, ()):
                stored = self.stored[name]
                with torch.inference_mode(self._home.is_apart or not stored.codec.plain):
                    values[name] = self._home.given(stored.read(part)) if decode else unread
        return values

    def take(self, number: int, names: Sequence[str], state: Mapping[str, Any]) -> None:
        """Overwrite stored tensors of one fragment.

        Tensors missing in ``state`` become zeros, or start fresh.
        """
        part, device = self.part(number), self._home.device
        for name in names:
            value = state.get(name)
            if value is not None:
                self.encoded(name).write(part, value.reshape(-1).to(device, MASTER_DTYPE))
            elif name in self.stored and name not in self._codecs:
                self.stored[name].write(part, torch.zeros(part.stop - part.start, device=device))
            if name in self._unbegun:
                (self._unbegun[name].add if value is None else self._unbegun[name].discard)(number)

    def edit(self, number: int, name: str, changed: Tensor, values: Tensor) -> None:
        """Overwrite some elements of a fragment's stored tensor; see :meth:`.Encoded.edit`."""
        device = self._home.device
        self.stored[name].edit(self.part(number), changed.to(device), values.to(device))

    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors themselves that store elements."""
        for stored in self.stored.values():
            yield from stored.pieces
        if self._keys is not None:
            yield self._keys

    def nbytes(self, averages: bool) -> int:
        """Return the bytes of the averages, or of everything else."""
        names = [name for name in self.stored if (name in self._codecs) == averages]
        nbytes = sum(self.stored[name].nbytes for name in names)
        if self._keys is not None and averages != moment_codec(self._config, "").by_chance:
            nbytes += self._keys.nbytes
        return nbytes


class Key(NamedTuple):
    """The key of ranges with equal numbers.

    Attributes:
        place: index, among all shards' fragments, of a fragment with their step count.
    """

    rule: Rule
    group: GroupId
    place: int


class Range(NamedTuple):
    """A part of a shard that one call updates.

    Attributes:
        key: index of its numbers in the update; for several groups, that of the first group.
        places: for several groups, see :class:`.NamedOperands`.
    """

    state: ShardState
    part: slice
    fusion: Fusion
    key: int
    places: Tensor | None = None


class Update(ABC):
    """The update of one optimizer and its epilogues.

    Args:
        ready: called, on all ranks alike, with packs that are updated before others.

    Attributes:
        elementwise: whether state tensors have one element per element of the parameter.
    """

    elementwise = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: ShardcastConfig,
        epilogues: tuple[Epilogue, ...],
        ready: Ready,
    ) -> None:
        self._optimizer, self._config, self.epilogues = optimizer, config, epilogues
        self._ready = ready
        self._shards: list[Shard] = []  # the same shards on all ranks, with or without own parts
        self._states: dict[Shard, ShardState] = {}  # states of shards with fragments
        self._places = {name: n for n, e in enumerate(epilogues) for name in e.state}
        # Number of steps that each epilogue has taken part in.
        self._epilogue_steps = torch.zeros(len(epilogues), dtype=MASTER_DTYPE)

    @abstractmethod
    def add(self, shard: Shard) -> None:
        """Update ``shard``, too, from now on."""

    @abstractmethod
    def __call__(self, decision: Decision) -> None:
        """Unscale, clip, update and cast the own spans; leave absent gradients untouched."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state that the class keeps per parameter, if known in advance."""
        return ("step",)

    @property
    def _is_apart(self) -> bool:
        """Whether masters are on another device than the model."""
        return any(shard.home.is_apart for shard in self._shards[:1])

    def _finish(self, shard: Shard) -> None:
        """Copy an updated shard to the model if masters are on another device, and start its sync.

        It runs while others are updated; all ranks do it in the same order.
        """
        if shard.home.is_apart:
            if shard.fragments:
                shard.home.send()
            self._ready([shard.pack])

    def switch(self, _mode: str) -> bool:
        """Call ``train`` or ``eval``; return whether masters changed and were published."""
        return False

    @abstractmethod
    def begin_state(self) -> None:
        """Create the state after a first step with zero gradients; masters do not change."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the state, without 0-dim tensors and averages."""

    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors themselves that store elements: state, and views of masters."""
        for state in self._states.values():
            yield from state.memory()

    def averages_nbytes(self) -> int:
        """Return the bytes of all averages."""
        return sum(state.nbytes(averages=True) for state in self._states.values())

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Any]:
        """Return torch's state of one fragment, and averages with their numbers of steps."""
        if shard not in self._states:
            return {}
        values = self._states[shard].read(number, [*self._places], decode)
        counts = self.steps_of_averages()
        return values | {name + STEPS: counts[name + STEPS] for name in values}

    def steps_of_averages(self) -> dict[str, Tensor]:
        """Return how many steps each average has seen, as on all ranks; 0-dim."""
        counts = self._epilogue_steps.clone()  # a copy, which later steps do not change
        return {name + STEPS: counts[place] for name, place in self._places.items()}

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment; a frozen fragment has none."""
        if shard in self._states:
            self._load_averages(shard, number, state, [*self._places])
            torchs = {name: value for name, value in state.items() if not name.startswith(AVERAGE)}
            self._load_state(shard, number, torchs)

    def edit(self, shard: Shard, number: int, name: str, changed: Tensor, values: Tensor) -> None:
        """Overwrite some elements of a fragment's per-element state tensor.

        Args:
            changed: 1-d bool, the elements to write; all others keep their bits.
            values: 1-d fp32, values of all elements.
        """
        self._states[shard].edit(number, name, changed, values)

    def load_average(self, shard: Shard, number: int, name: str, values: Tensor) -> None:
        """Overwrite an average of one fragment, 1-d."""
        name = AVERAGE + name
        self._load_averages(shard, number, {name: values}, [name])

    def _load_averages(
        self, shard: Shard, number: int, state: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        if shard in self._states:
            self._states[shard].take(number, names, state)
        for name in names:
            if name + STEPS in state:
                self._epilogue_steps[self._places[name]] = float(state[name + STEPS])

    @property
    def epilogue_steps(self) -> list[float]:
        """Steps that each epilogue has taken part in, equal on all ranks. Waits for the device.

        A load first sets them to zero, and then to the maximum that any rank loaded: a state has
        them with each parameter, and a rank may own none of those.
        """
        steps: list[float] = self._epilogue_steps.tolist()
        return steps

    @epilogue_steps.setter
    def epilogue_steps(self, steps: Sequence[float]) -> None:
        # others may hold the old tensor
        self._epilogue_steps = self._epilogue_steps.new_tensor(steps)

    @abstractmethod
    def _load_state(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite torch's state of one fragment."""

    def average(self, shard: Shard, number: int, name: str) -> Tensor:
        """Return an average, 1-d fp32; before its first step, or if frozen, the masters."""
        state, fragment = self._states.get(shard), shard.fragments[number]
        values = {} if state is None else state.read(number, [AVERAGE + name], decode=True)
        return values[AVERAGE + name] if values else shard.exact(fragment)

    def _begin_epilogues(self, taken: Tensor) -> None:
        """Count a step; ``taken`` is 0-dim: 1, or 0 for a skipped step."""
        if self.epilogues:
            for state in self._states.values():
                state.begin()
            # In place, so that a captured step continues where the last one ended.
            self._epilogue_steps = self._epilogue_steps.to(taken.device).add_(taken)

    def _behind_rules(self, on_host: bool) -> tuple[tuple[tuple[Any, ...], ...], Tensor | None]:
        """Return the epilogues' numbers in this step, and the steps that each has taken part in."""
        if not self.epilogues:
            return (), None
        steps = self._epilogue_steps
        counts: Any = steps.tolist() if on_host else steps.double().unbind()
        behind = [e.numbers(count) for e, count in zip(self.epilogues, counts, strict=True)]
        if not on_host:
            behind = [as_tensors(numbers, counts[0]) for numbers in behind]
        return tuple(behind), steps
