"""Following a training: what ``optimizer.changes(since=version)`` gives, applied elsewhere.

A reader has a model, or a dictionary of tensors, without an optimizer and without a process group.
:func:`apply` checks and writes; :class:`FolderSender` and :class:`FolderReader` bring changes
through a directory. How they travel otherwise is up to a script: they are tensors with names.
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
