"""The ways in which owners' spans of a pack reach everybody; all ranks go them in the same order.

A way is made for one pack. It is called with ``async_op``: whether to launch only, and return what
must be waited for before any use of the pack. Otherwise it runs in the order of the current stream,
as if it were done when it returns; what it returns must be waited for before the call that syncs
all packs returns, on backends without streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardcast.comm import Works
from shardcast.memory.pack import Pack

Way = Callable[[bool], Works | None]  # of async_op


def all_gather(pack: Pack) -> Way:
    """In place: one launch, for spans of equal length; sends padding too."""
    comm = pack.comm
    return lambda async_op: comm.all_gather(pack.data, pack.span(pack.own), pack.layout, async_op)


def broadcast(pack: Pack) -> Way:
    """Each owner sends its span, of any length, all in one launch; padding alone stays at home."""
    spans = pack.layout.owned_spans()

    def run(async_op: bool) -> Works | None:
        pieces = [(span.owner, pack.span(span)) for span in spans]
        return pack.comm.broadcast_all(pieces, pack.layout, async_op) if pieces else None

    return run


def messages(pack: Pack) -> Way:
    """From rank to rank, on gloo, whose broadcasts wait for one another; started ones are these.

    A message must be waited for at once (see :meth:`Comm.send_to_all`), so none can be left under
    way beside a forward.
    """
    start, spans = broadcast(pack), pack.layout.owned_spans()

    def run(async_op: bool) -> Works | None:
        if async_op:
            return start(async_op)
        pieces = [pack.data[:0]] * pack.comm.size
        for span in spans:
            pieces[span.owner] = pack.span(span)
        return pack.comm.send_to_all(pieces, pack.layout)

    return run


WAYS: Mapping[str, Callable[[Pack], Way]] = {
    "all_gather": all_gather,
    "broadcast": broadcast,
    "messages": messages,
}
