"""Follow a training run: apply its ``optimizer.changes(since=version)`` in another process.

A reader has a model, or a dictionary of tensors, and needs no optimizer or process group.
:func:`apply` checks changes and writes them. :class:`FolderSender` and :class:`FolderReader` send
them through a directory. A script may send them in any other way, because they are named tensors.
"""

from shardcast.serving.applying import (
    DamagedChangesError,
    IncompleteChangesError,
    WrongModelError,
    WrongVersionError,
    apply,
)
from shardcast.serving.folder import FolderReader, FolderSender
from shardcast.serving.patches import Changes, WeightPatch, step_of

__all__ = [
    "Changes",
    "DamagedChangesError",
    "FolderReader",
    "FolderSender",
    "IncompleteChangesError",
    "WeightPatch",
    "WrongModelError",
    "WrongVersionError",
    "apply",
    "step_of",
]
