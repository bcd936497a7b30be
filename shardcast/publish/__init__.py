"""Following a training: what ``optimizer.changes(since=version)`` gives, applied elsewhere.

A reader has a model, or a dictionary of tensors, without an optimizer and without a process group.
:func:`apply` checks and writes; :class:`FolderSender` and :class:`FolderReader` bring changes
through a directory. How they travel otherwise is up to a script: they are tensors with names.
"""

from shardcast.extensions.changes.patches import Changes, WeightPatch, step_of

from .applying import (
    DamagedChangesError,
    IncompleteChangesError,
    WrongModelError,
    WrongVersionError,
    apply,
)
from .folder import FolderReader, FolderSender

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
