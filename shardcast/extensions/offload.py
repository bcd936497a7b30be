"""``offload``: windows of host memory through an accelerator: one comes while another is updated.

Three lanes work at the same time::

    fetch      n+1 ...              host to device
    current        n ...            the update, in the order of everything else
    send               n-1 ...      device to host

Hazards, and what orders them: a window is updated after its fetch and sent after its update. Its
memory is given back when a later fetch has been told to wait for its send; it belongs to the fetch
lane, so nothing before that can get it, and no more than three windows are on the device. The
first fetch waits for what the current stream had to do before, and the current stream in the end
for the last send. The host waits for nothing.

No ``record_stream``: a block freed that way comes back when the host polls its events, at some
later time, so that more windows would be held. Host memory comes from torch's allocator of pinned
memory, which rounds each tensor up to a power of two bytes: up to twice what it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from shardcast.option_values import Option

Window = TypeVar("Window")
Values = TypeVar("Values")
Lane = Literal["fetch", "update", "send"]
BEHIND = 2  # sends that may be under way when a fetch begins


class StreamLanes:
    """Queues of work: the current stream of a CUDA device, which updates, and two more.

    An event is reached when all work before it in its queue is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = {"fetch": torch.cuda.Stream(device), "send": torch.cuda.Stream(device)}

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def queue(
        self, lane: Lane, work: Callable[[], Any], after: torch.cuda.Event
    ) -> tuple[Any, torch.cuda.Event]:
        stream = self._current if lane == "update" else self._beside[lane]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            result = work()
        return result, stream.record_event()

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._current.record_event()
        return event

    def join(self, event: torch.cuda.Event) -> None:
        self._current.wait_event(event)


def through(
    lanes: StreamLanes,
    windows: Iterable[Window],
    fetch: Callable[[Window], Values],
    update: Callable[[Window, Values], None],
    send: Callable[[Window, Values], None],
) -> None:
    """Fetch, update and send back each window, in order.

    Args:
        fetch: allocates and fills what ``update`` changes and ``send`` gives back.
    """
    begun = lanes.mark()
    sends: deque[tuple[Any, Values]] = deque()  # keeps what they read alive
    last = None

    def fetched(window: Window) -> tuple[Window, Values, Any]:
        event = begun
        if len(sends) == BEHIND:
            event = sends.popleft()[0]  # and let its memory go
        return (window, *lanes.queue("fetch", lambda: fetch(window), event))

    coming = map(fetched, windows)
    ahead = next(coming, None)
    while ahead is not None:
        window, values, fetched_event = ahead
        ahead = next(coming, None)
        _, done = lanes.queue("update", lambda w=window, v=values: update(w, v), fetched_event)  # type: ignore[misc]
        _, last = lanes.queue("send", lambda w=window, v=values: send(w, v), done)  # type: ignore[misc]
        sends.append((last, values))
        del values
    if last is not None:
        lanes.join(last)


def _transfers(device: torch.device) -> Callable[..., None] | None:
    return partial(through, StreamLanes(device)) if device.type == "cuda" else None


OPTION = Option(
    help="keep masters and moments in host memory; the update fetches windows of them",
    transfers=_transfers,
    state_on_host=True,
    fused=True,
)
