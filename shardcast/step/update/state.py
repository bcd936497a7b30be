"""What an update keeps for each shard: torch's state of its parameters, and that of epilogues."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.chance import row_keys
from shardcast.memory.codecs import Encoded, moment_codec, row_of
from shardcast.memory.shard import Shard
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update.epilogues import AVERAGE, STEPS, Epilogue
from shardcast.step.update.fusion import Fusion, Numbers, Operands
from shardcast.step.update.rules import Rule, as_tensors


class ShardState:
    """The state of one shard, and the operands of its update.

    Attributes:
        first: the place of its first fragment among those of all shards of the update.
        stored: torch's state and that of epilogues by name, parallel to the master; made when
            first used, zeros.
        row_sums: what epilogues summed up in the last update that was measured, ``(sums, rows)``.
        segments: where each fragment begins in each row of these, counted through, and their end.
    """

    def __init__(
        self, shard: Shard, config: ShardcastConfig, epilogues: tuple[Epilogue, ...], first: int
    ) -> None:
        self.shard, self.first = shard, first
        self.stored: dict[str, Encoded] = {}
        self._config = config
        self._row = row_of(config, shard.pack.layout.dtype)
        self._codecs = {name: e.codec(name) for e in epilogues for name in e.state}
        # Fragments of which an epilogue has no values yet.
        self._unbegun = {name: {*range(len(shard.fragments))} for name in self._codecs}
        self._keys: Tensor | None = None
        self.row_sums, self.segments = torch.empty(0), torch.empty(0)
        self._prepared: tuple[Rule, tuple[Epilogue, ...], Fusion] | None = None
        self._fetched: tuple[Any, ...] = ()  # what the operands are of, by identity
        self._operands = Operands()

    def encoded(self, name: str) -> Encoded:
        """One state tensor."""
        if name not in self.stored:
            codec = self._codecs.get(name) or moment_codec(self._config, name)
            pack = self.shard.pack
            self.stored[name] = Encoded(
                codec, pack.own.numel, self._row, pack.data.device, on_host=self._config.offload
            )
        return self.stored[name]

    def begin(self) -> None:
        """Let the stored tensors of epilogues begin as the masters, where none were loaded."""
        for name, numbers in self._unbegun.items():
            for number in numbers:
                values = self.shard.exact(self.shard.fragments[number])
                self.encoded(name).write(self.part(number), values)
            numbers.clear()

    def part(self, number: int) -> slice:
        """One fragment, as a slice of the own span."""
        fragment = self.shard.fragments[number]
        return self.shard.local(fragment.start, fragment.stop)

    def prepare(self, rule: Rule, epilogues: tuple[Epilogue, ...]) -> Fusion:
        """What is fused for ``rule``; allocates what it needs."""
        if self._prepared is not None and self._prepared[:2] == (rule, epilogues):
            return self._prepared[2]
        names = (*rule.state, *self._codecs)
        state = tuple(self.encoded(name).codec for name in names)
        master, casts = self.shard.master.codec, self.shard.casts
        fusion = Fusion(rule, master, state, casts, self._row, epilogues)
        if fusion.by_chance and self._keys is None:
            self._keys = row_keys(self.shard, self._row)
        sums = sum(len(epilogue.sums) for epilogue in epilogues)
        if sums and not self.row_sums.numel():
            rows, device = -(-self.shard.pack.own.numel // self._row), self.shard.published.device
            self.row_sums = torch.zeros(sums, rows, dtype=MASTER_DTYPE, device=device)
            begins = [self.part(n).start // self._row for n in range(len(self.shard.fragments))]
            segments = [number * rows + begin for number in range(sums) for begin in begins]
            self.segments = torch.tensor([*segments, sums * rows]).to(device)
        self._prepared = rule, epilogues, fusion
        return fusion

    def fetch(self, part: slice, fusion: Fusion, old: Encoded | None = None) -> Operands:
        """The operands of the update of ``part`` of the own span; see :class:`.Fusion`.

        They are the same object as long as they are the same memory.

        Args:
            old: in place of the masters.
        """
        shard = self.shard
        assert shard.grads is not None
        own, data, first = shard.grads.own, shard.pack.data, shard.master.first
        fetched = fusion, own, data, first, part.start, part.stop
        same = self._fetched and all(map(operator.is_, fetched[:4], self._fetched))
        if same and old is None and fetched[4:] == self._fetched[4:]:
            return self._operands
        operands = Operands([own[part]])
        if fusion.casts:
            operands.append(shard.published[part])
        for encoded in self._all(fusion, old):
            operands += encoded.fetch(part)
        rows = slice(part.start // self._row, -(-part.stop // self._row))
        if fusion.by_chance:
            assert self._keys is not None
            operands.append(self._keys[rows])
        if any(epilogue.sums for epilogue in fusion.epilogues):
            operands += [sums[rows] for sums in self.row_sums]
        # Sharded gradients are new in each step: kept operands would keep the last ones.
        if old is None and not self._config.offload and self._config.grads == "full":
            self._fetched, self._operands = fetched, operands
        return operands

    def send(self, part: slice, fusion: Fusion, operands: Sequence[Tensor]) -> None:
        """Take updated operands back; nothing is done for those that are the memory itself."""
        if not self._config.offload:
            return
        for encoded, pieces in zip(self._all(fusion), fusion.parts(operands).stored, strict=True):
            encoded.send(part, pieces)

    def _all(self, fusion: Fusion, old: Encoded | None = None) -> Iterator[Encoded]:
        """Masters and state in the order of operands."""
        yield old or self.shard.master
        for name in (*fusion.rule.state, *self._codecs):
            yield self.stored[name]

    def read(self, number: int, names: Sequence[str], decode: bool) -> dict[str, Tensor]:
        """Stored tensors of one fragment, 1-d fp32, those that have begun.

        Args:
            decode: without it, to count them, they are on the meta device.
        """
        part = self.part(number)
        unread = torch.empty(part.stop - part.start, dtype=MASTER_DTYPE, device="meta")
        return {
            name: self.stored[name].read(part) if decode else unread
            for name in names
            if name in self.stored and number not in self._unbegun.get(name, ())
        }

    def take(self, number: int, names: Sequence[str], state: Mapping[str, Any]) -> None:
        """Overwrite stored tensors of one fragment.

        Those that ``state`` has not become zeros, or begin anew.
        """
        part, device = self.part(number), self.shard.published.device
        for name in names:
            value = state.get(name)
            if value is not None:
                self.encoded(name).write(part, value.reshape(-1).to(device, MASTER_DTYPE))
            elif name in self.stored and name not in self._unbegun:
                self.stored[name].write(part, torch.zeros(part.stop - part.start, device=device))
            if name in self._unbegun:
                (self._unbegun[name].add if value is None else self._unbegun[name].discard)(number)

    def nbytes(self, averages: bool) -> int:
        """Bytes of the averages, or of all else."""
        names = [name for name in self.stored if (name in self._codecs) == averages]
        nbytes = sum(self.stored[name].nbytes for name in names)
        if not averages:
            nbytes += self.row_sums.nbytes
        if self._keys is not None and averages != moment_codec(self._config, "").by_chance:
            nbytes += self._keys.nbytes
        return nbytes


class EpilogueStates:
    """What the epilogues of one update keep: stored tensors of its shards, and counts of steps.

    Args:
        states: of the shards; it may grow.
    """

    def __init__(self, epilogues: tuple[Epilogue, ...], states: Mapping[Shard, ShardState]) -> None:
        self._epilogues, self._states = epilogues, states
        self._places = {name: n for n, epilogue in enumerate(epilogues) for name in epilogue.state}
        self.steps = torch.zeros(len(epilogues), dtype=MASTER_DTYPE)  # each has taken part in
        self.active: tuple[Epilogue, ...] = ()  # in this step

    def begin(self, taken: Tensor, measured: bool) -> None:
        """Count a step.

        Args:
            taken: 0-dim bool, whether it is not skipped.
            measured: whether epilogues with sums run in it.
        """
        self.active = tuple(e for e in self._epilogues if measured or not e.sums)
        for state in self._states.values():
            state.begin()
        self.steps = self.steps.to(taken.device) + taken

    def numbers(self, step: Tensor, rule: tuple[Any, ...], on_host: bool) -> Numbers:
        """Those of this step, beside a rule's."""
        if not self.active:
            return Numbers(step, rule)
        steps = self.steps[: len(self.active)]  # epilogues with sums stand last
        if on_host:
            pairs: Any = zip(self.active, steps.tolist(), strict=True)
            behind = tuple(epilogue.numbers(count) for epilogue, count in pairs)
        else:
            counts = steps.double().unbind()
            pairs = zip(self.active, counts, strict=True)
            behind = tuple(as_tensors(e.numbers(count), count) for e, count in pairs)
        return Numbers(step, rule, behind, steps)

    def average(self, shard: Shard, number: int, name: str) -> Tensor:
        """Of one fragment, 1-d fp32; the masters before its first step, and where it is frozen."""
        state, fragment = self._states.get(shard), shard.fragments[number]
        values = {} if state is None else state.read(number, [AVERAGE + name], decode=True)
        return values.get(AVERAGE + name, shard.exact(fragment))

    def fragment_state(self, shard: Shard, number: int, decode: bool) -> dict[str, Tensor]:
        """Averages of one fragment by name, each with its number of steps, 0-dim."""
        if shard not in self._states:
            return {}
        values = self._states[shard].read(number, [*self._places], decode)
        return values | {name + STEPS: self.steps[self._places[name]] for name in values}

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take averages of one fragment out of ``state``; what is not an average is returned."""
        if shard in self._states:
            self._states[shard].take(number, [*self._places], state)
        for name, place in self._places.items():
            if name + STEPS in state:
                self.steps[place] = float(state[name + STEPS])
        return {name: value for name, value in state.items() if not name.startswith(AVERAGE)}

    def load(self, shard: Shard, number: int, name: str, values: Tensor, steps: int) -> None:
        """Overwrite an average of one fragment, 1-d, and its number of steps."""
        if shard in self._states:
            self._states[shard].take(number, [AVERAGE + name], {AVERAGE + name: values})
        self.steps[self._places[AVERAGE + name]] = steps

    def sums(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Row sums and segments of :class:`ShardState`; empty before a measured update."""
        state = self._states[shard]
        return state.row_sums, state.segments

    def nbytes(self) -> int:
        """Bytes of all averages."""
        return sum(state.nbytes(averages=True) for state in self._states.values())
