"""Checkpoints that are whole or not there, load on any grid of ranks, and open in plain PyTorch.

::

    resumed = checkpoint.resume("runs/a", model, optimizer)      # None in a new run
    for step in range(0 if resumed is None else resumed.step, steps):
        ...
        checkpoint.save("runs/a", model, optimizer, step=step + 1, extra=..., keep=3)

:func:`save`, :func:`load` and :func:`resume` are collective: every rank of the optimizer's group,
which is that of the whole mesh if it has one, must call them, and so are :func:`save_async`,
:func:`load_plain` and :func:`import_dcp`. :func:`latest`, :func:`inspect` and :func:`export` are
local.
"""

from shardcast.checkpoint.background import Saving, save_async
from shardcast.checkpoint.dcp import DamagedCheckpointError, Stored
from shardcast.checkpoint.directory import Manifest, inspect, latest
from shardcast.checkpoint.exporting import export
from shardcast.checkpoint.importing import import_dcp, load_plain
from shardcast.checkpoint.loading import Resumed, load, resume
from shardcast.checkpoint.saving import save

__all__ = [
    "DamagedCheckpointError",
    "Manifest",
    "Resumed",
    "Saving",
    "Stored",
    "export",
    "import_dcp",
    "inspect",
    "latest",
    "load",
    "load_plain",
    "resume",
    "save",
    "save_async",
]
