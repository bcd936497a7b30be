"""``changes``: which published values have changed since somebody asked last.

An inference engine that follows a training, or a copy of the model, needs the few values that a
step at a small learning rate changes. Where the owner of an element casts its new value it sees
whether that is another one; a bit per element is all that has to be kept (:mod:`.records`). When a
script asks, they become values and indices of whole parameters (:mod:`.patches`), which
:mod:`shardcast.publish` writes and applies.
"""

from __future__ import annotations

from typing import Any

from shardcast.extensions.changes.records import Followed, record_of
from shardcast.option_values import Option


def _hook(optimizer: Any) -> Any:
    from shardcast.extensions.changes.asking import ChangesOfRank

    return ChangesOfRank(optimizer)


OPTION = Option(
    help="note which published values change, for optimizer.changes(since=version): a bit for each "
    "element that a rank owns; fp32 parameters and master split16: a copy of the value",
    epilogues=lambda _config: (Followed(),),
    record=record_of,
    hook=_hook,
)
