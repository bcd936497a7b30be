"""The history of a rank's gradients between two steps, which must be that of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

BACKWARDS, CLEARS = "synchronized backwards of a step", "clears of their gradients"
STALE = "gradients that parameters of an added group had already"
ASSIGNED = "gradients assigned between two backwards of a step"
CLEARED = "gradients cleared between two backwards of a step"
SUMMED = "gradients assigned between two backwards that are summed over model-parallel ranks"
EDITED = "edits of gradients after the clip of the step before"
HISTORY = BACKWARDS, CLEARS, STALE, ASSIGNED, CLEARED, EDITED
NOTHING = {BACKWARDS: 0, CLEARS: 0, STALE: 0, ASSIGNED: "", CLEARED: "", SUMMED: "", EDITED: False}
SHOWN = 3  # names


def listed(names: Sequence[str]) -> str:
    """List the first names and how many more, which differs where any of them does."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    rest = names[SHOWN:]
    return f"{', '.join(names[:SHOWN])} and {len(rest)} more ({zlib.crc32(repr(rest).encode()):x})"
