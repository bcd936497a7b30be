"""Slices of long tensors, which are worked on some elements at a time."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 16  # elements of a CPU whose copies in a wider dtype stay in its cache
PIECE = 1 << 22  # elements of which copies are held meanwhile
LAUNCH = 1 << 24  # elements of an eager call on an accelerator, where each is a kernel launch


def slices(stop: int, size: int = PIECE, start: int = 0) -> Iterator[slice]:
    """Give slices of at most ``size`` elements, from ``start`` to ``stop``."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))
