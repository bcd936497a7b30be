"""Windows through an accelerator, on lanes that run in any order that their events permit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardcast.extensions.offload import through

pytestmark = pytest.mark.timeout(60)

SIZE, WINDOWS = 4, 9


class Device:
    """Lanes that only note their work; :meth:`run` does it, in a random order of what may run.

    Memory is like that of a caching allocator: given back when the host forgets it, whatever the
    lanes still have to do, and handed out again to the next fetch.
    """

    def __init__(self, seed: int) -> None:
        self.queues: dict[str, list[tuple[Any, Any]]] = {"fetch": [], "update": [], "send": []}
        self.random, self.lane = random.Random(seed), "update"
        self.free: list[Tensor] = []
        self.most = self.held = 0

    def allocate(self) -> Memory:
        self.held += 1
        self.most = max(self.most, self.held)
        return Memory(self, self.free.pop() if self.free else torch.zeros(SIZE))

    def note(self, operation: Callable[[], Any]) -> None:
        self.queues[self.lane].append((operation, None))

    def queue(self, lane: str, work: Callable[[], Any], after: Any) -> tuple[Any, Any]:
        self.queues[lane].append((None, after))
        self.lane, before = lane, self.lane
        result = work()
        self.lane = before
        return result, (lane, len(self.queues[lane]))

    def mark(self) -> Any:
        return "update", len(self.queues["update"])

    def join(self, event: Any) -> None:
        self.queues["update"].append((None, event))

    def run(self) -> None:
        done = dict.fromkeys(self.queues, 0)

        def ready(lane: str) -> bool:
            if done[lane] == len(self.queues[lane]):
                return False
            after = self.queues[lane][done[lane]][1]
            return after is None or done[after[0]] >= after[1]

        while able := [lane for lane in self.queues if ready(lane)]:
            lane = self.random.choice(able)
            operation, _ = self.queues[lane][done[lane]]
            if operation is not None:
                operation()
            done[lane] += 1
        assert all(done[lane] == len(queue) for lane, queue in self.queues.items()), "deadlock"


class Memory:
    def __init__(self, device: Device, values: Tensor) -> None:
        self.device, self.values = device, values

    def __del__(self) -> None:
        self.device.held -= 1
        self.device.free.append(self.values)


def after_steps(seed: int, windows: int = WINDOWS, steps: int = 2) -> Any:
    """What the host holds after two steps, what is read after each, and the device."""
    device = Device(seed)
    host = torch.arange(float(windows * SIZE)).view(windows, SIZE)
    gradient, seen = torch.zeros(SIZE), []

    def fetch(window: int) -> Memory:
        memory = device.allocate()
        values = memory.values
        device.note(lambda: values.copy_(host[window]))
        return memory

    def update(window: int, memory: Memory) -> None:
        values = memory.values
        device.note(lambda: values.mul_(1 + window).add_(gradient))

    def send(window: int, memory: Memory) -> None:
        values = memory.values
        device.note(lambda: host[window].copy_(values))

    for _ in range(steps):
        device.note(lambda: gradient.add_(1))  # before the step, on the current stream
        through(device, range(windows), fetch, update, send)
        device.note(lambda: seen.append(host.clone()))  # after it
    device.run()
    return host, seen, device


def expected(windows: int, steps: int) -> Tensor:
    host = torch.arange(float(windows * SIZE)).view(windows, SIZE)
    for step in range(steps):
        host = host * torch.arange(1.0, windows + 1)[:, None] + step + 1
    return host


@pytest.mark.parametrize("windows", [0, 1, 2, 3, WINDOWS])
def test_any_order_of_the_lanes_gives_what_one_after_the_other_gives(windows: int):
    for seed in range(200):
        host, seen, device = after_steps(seed, windows)
        assert torch.equal(host, expected(windows, 2))
        assert [torch.equal(s, expected(windows, n + 1)) for n, s in enumerate(seen)] == [True] * 2
        assert device.held == 0


def test_no_more_than_three_windows_are_on_the_device():
    assert after_steps(0, 30)[-1].most == 3


def test_a_window_is_fetched_before_the_one_ahead_of_it_is_updated():
    """The fetch lane may run ahead until it needs memory of a window that was not sent yet."""
    *_, device = after_steps(0, steps=1)
    waits = [after for operation, after in device.queues["fetch"] if operation is None]
    assert waits[0] == waits[1] == waits[2] == ("update", 1)
    assert waits[3:] == [("send", 2 * n + 2) for n in range(WINDOWS - 3)]
