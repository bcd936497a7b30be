"""The optimizers that were given to :func:`shardcast.shard`, with their groups numbered through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Groups = Mapping[int, dict[str, Any]]  # parameter groups by number


class Originals:
    """One optimizer, or several over disjoint parameters of one model.

    Attributes:
        optimizers: in the order in which they were given.
        groups: the parameter groups of all of them; the number of a group is its place here.
        places: of each group, the place of its optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.groups: list[dict[str, Any]] = []
        self.places: list[int] = []
        for place, optimizer in enumerate(self.optimizers):
            self.groups += optimizer.param_groups
            self.places += [place] * len(optimizer.param_groups)

    @classmethod
    def of(
        cls, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Originals
    ) -> Originals:
        """One optimizer, a sequence of them, or what is that already."""
        if isinstance(optimizers, Originals):
            return optimizers
        one = isinstance(optimizers, torch.optim.Optimizer)
        return cls([optimizers] if one else optimizers)  # type: ignore[list-item, arg-type]

    @property
    def name(self) -> str:
        """Their classes, for people."""
        return " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def owner(self, number: int) -> torch.optim.Optimizer:
        """The optimizer of a group."""
        return self.optimizers[self.places[number]]

    def numbers(self, place: int) -> list[int]:
        """The numbers of the groups of the optimizer at ``place``."""
        return [number for number, other in enumerate(self.places) if other == place]

    def numbered(self) -> Iterator[tuple[int, torch.optim.Optimizer, dict[str, Any]]]:
        """Every group with its number and its optimizer."""
        for number, group in enumerate(self.groups):
            yield number, self.owner(number), group

    def option_names(self) -> tuple[str, ...]:
        """The options of their classes; whatever else is in a group is a script's own note."""
        return tuple(dict.fromkeys(n for o in self.optimizers for n in o.defaults))

    @contextmanager
    def added(self, place: int) -> Iterator[None]:
        """The last of ``groups`` is of the optimizer at ``place``, unless what follows fails."""
        self.places.append(place)
        try:
            yield
        except BaseException:
            self.groups.pop()
            self.places.pop()
            raise
        self.optimizers[place].param_groups.append(self.groups[-1])
