"""The arithmetic of a decision as two compiled graphs, for accelerators.

Its operations are on a few numbers each, so that what they cost is the host: a graph has few
kernels if it is compiled for the very lengths, which change where packs come to be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar

from torch import Tensor

from shardcast._compat import inductor
from shardcast.step.decide.decision import Arithmetic, Members, Outcome
from shardcast.step.decide.signal import Signal
from shardcast.step.fallback import or_eager

T = TypeVar("T")


class Graphs:
    """The graphs of one arithmetic, called directly where they were called like that before.

    Args:
        others: the signals, by place, that read in another way than by arithmetic: before a graph.
    """

    def __init__(self, arithmetic: Arithmetic, others: Mapping[int, Signal]) -> None:
        self._arithmetic, self._others = arithmetic, others
        self._graphs: dict[Any, Callable[..., Any]] = {}  # by what they are compiled for
        self._last_join, self._last_decision = inductor.KeptCall(), inductor.KeptCall()
        self._absent: list[bool] = []  # a factor that removes a scale, and those of groups

    def vector(
        self, powers: Tensor, members: Members, from_last: Tensor, own: Sequence[Tensor]
    ) -> Tensor:
        """Do as :meth:`.Arithmetic.joined`."""
        operands = [powers, from_last, *own]
        bound = [] if members.mask is None else [members.mask]
        kind = *map(id, bound), *inductor.kinds(operands)
        if self._last_join.serves(kind):
            return self._last_join(operands)[0]
        graph = self._graph(_joined, kind)
        vector: Tensor = graph(self._arithmetic, powers, members, from_last, own)
        self._last_join.keep(kind, bound, operands, [vector], constants=True)
        return vector

    def outcome(
        self, vector: Tensor, sizes: Sequence[int], bound: Tensor | None,
        bounds: Sequence[Tensor | None],
    ) -> Outcome:  # fmt: skip
        """Do as :meth:`.Arithmetic.outcome`."""
        begins, readings = [0, *accumulate(sizes)], {}
        for place, signal in self._others.items():
            readings[place] = signal.read(vector[begins[place + 2] : begins[place + 3]])
        every = [bound, *bounds]  # 0-dim fp64
        operands = [vector, *readings.values(), *(it for it in every if it is not None)]
        # What else the graph depends on follows from the signals; of a signal that reads in another
        # way with more packs the part is longer then.
        absent = [it is None for it in every]
        kind = *sizes, *absent, *inductor.kinds([*readings.values()])
        if self._last_decision.serves(kind):
            results = iter(self._last_decision(operands))
            norm, skip, taken, multiplier, increment = islice(results, 5)
            unscale, *factors = (None if absent else next(results) for absent in self._absent)
            return Outcome(norm, skip, taken, multiplier, increment, unscale, factors)
        graph = self._graph(_outcome, kind)
        outcome: Outcome = graph(self._arithmetic, vector, sizes, readings, bound, bounds)
        maybe = [outcome.unscale, *outcome.factors]
        self._absent = [tensor is None for tensor in maybe]
        returned = [*outcome[:5], *(tensor for tensor in maybe if tensor is not None)]
        self._last_decision.keep(kind, (), operands, returned, constants=True)
        return outcome

    def _graph(self, function: Callable[..., T], kind: tuple[Any, ...]) -> Callable[..., T]:
        """Return the function, compiled for operands of that kind."""
        key = function, kind
        if key not in self._graphs:
            self._graphs[key] = _compiled(function)
        return self._graphs[key]


def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    graph = inductor.compiled(function, notes=True, few=True)
    return or_eager(graph, function, "the decision of a step")


def _joined(arithmetic: Arithmetic, *arguments: Any) -> Tensor:
    return arithmetic.joined(*arguments)


def _outcome(arithmetic: Arithmetic, *arguments: Any) -> Outcome:
    return arithmetic.outcome(*arguments)
