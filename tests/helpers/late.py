"""Copies between the host and a pretended device, each as late as permitted.

A copy to the host reads as NaN before it was waited for, and if its source changed meanwhile.
Writing to the source of a copy to the device before it was waited for is an error.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from shardcast.extensions import offload


class Pending:
    """A copy that is made when it is waited for, or earlier."""

    def __init__(self, bus: Late, make: Callable[[], None]) -> None:
        self.bus, self.make, self.done = bus, make, False

    def __call__(self) -> None:
        queue = self.bus.queue
        while not self.done:  # copies on one stream are made in order
            first = queue.pop(0)
            first.make()
            first.done = True


class Late(offload.Copies):
    """Copies of a pretended device: as late as permitted or, with ``chance``, earlier."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.chance, self.own = chance, threading.local()
        self.went_down = self.went_up = 0

    @property
    def queue(self) -> list[Pending]:
        """One queue per rank; ranks are threads."""
        if not hasattr(self.own, "queue"):
            self.own.queue = []
        return self.own.queue

    def issue(self, make: Callable[[], None]) -> Pending:
        self.queue.append(copy := Pending(self, make))
        if self.chance is not None and self.chance.random() < 0.3:
            copy()
        return copy

    def down(self, host: Tensor, values: Tensor) -> Pending:
        self.went_down += values.nbytes
        before = values.detach().clone()
        host.fill_(torch.nan)

        def make() -> None:
            torn = not torch.equal(before.view(torch.uint8), values.detach().view(torch.uint8))
            host.fill_(torch.nan) if torn else host.copy_(before)

        return self.issue(make)

    def up(self, values: Tensor, host: Tensor) -> Pending:
        self.went_up += host.nbytes
        values.copy_(host)
        before = host.clone()

        def make() -> None:
            now = host.view(torch.uint8)
            assert torch.equal(before.view(torch.uint8), now), "changed before its copy was made"

        return self.issue(make)
