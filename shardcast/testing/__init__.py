"""Process groups for unit tests.

``fake_world`` yields the group of one rank in a ``with`` block. The other two run ``fn(group,
*args)`` on every rank:

===================  ==============================  ==========================================
world                what it is                      use it for
===================  ==============================  ==========================================
`fake_world`         one rank of a large world       layout, memory, sequence of collectives
`threaded_world`     a thread per rank, real values  results, order of calls, misuse
`spawn`              a gloo process per rank         a final check
===================  ==============================  ==========================================

If you pass mesh sizes, ``threaded_world({"dp": 2, "tp": 2}, fn)`` or ``fake_world({"dp": 512,
"tp": 8})``, you get a ``DeviceMesh`` instead of a group, and DTensors work on it.

The groups of the first two worlds need no ``init_process_group``. Pass them to functions of
``torch.distributed`` as ``group=``, with ranks of the group (``group_src=``).
"""

from .fake import FakeGroup, fake_world
from .faults import (
    BufferHazardError,
    CollectiveMismatchError,
    RankLeftError,
    RendezvousTimeoutError,
)
from .record import Collective, assert_same_sequence
from .spawn import ProcessFailedError, SpawnedWorld, spawn, spawn_world
from .strict import StrictGroup
from .threads import ThreadedWorld, threaded_world

__all__ = [
    "BufferHazardError",
    "Collective",
    "CollectiveMismatchError",
    "FakeGroup",
    "ProcessFailedError",
    "RankLeftError",
    "RendezvousTimeoutError",
    "SpawnedWorld",
    "StrictGroup",
    "ThreadedWorld",
    "assert_same_sequence",
    "fake_world",
    "spawn",
    "spawn_world",
    "threaded_world",
]
