"""Checkpoints that are complete or absent, load on any mesh, and open in plain PyTorch.

::

    resumed = checkpoint.resume("runs/a", model, optimizer)      # None in a new run
    for step in range(0 if resumed is None else resumed.step, steps):
        ...
        checkpoint.save("runs/a", model, optimizer, step=step + 1, extra=..., keep=3)

Collective, on every rank of the optimizer's group (the whole mesh, if there is one): :func:`save`,
:func:`save_async`, :func:`load`, :func:`resume`, :func:`load_plain` and :func:`import_dcp`. Local:
:func:`latest`, :func:`inspect` and :func:`export`.
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
