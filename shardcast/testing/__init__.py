"""Process groups for unit tests.

Three worlds run the same functions ``fn(group, *args)``:

===================  ==============================  ==========================================
world                what it is                      use it for
===================  ==============================  ==========================================
`fake_world`         one rank of a large world       layout, memory, sequence at world 1,024
`threaded_world`     threads, strict rendezvous      real values, order, misuse
`spawn`              processes, gloo                 a final check
===================  ==============================  ==========================================

If you pass mesh sizes, ``threaded_world({"dp": 2, "tp": 2}, fn)`` or ``fake_world({"dp": 512,
"tp": 8})``, ``fn`` gets a ``DeviceMesh`` instead, on which DTensors work.

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
