"""Slices of long tensors, for work on some elements at a time."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 16  # elements whose copies in a wider dtype stay in a CPU's cache
PIECE = 1 << 22  # elements that are copied at a time
LAUNCH = 1 << 24  # elements per eager call on an accelerator, where each call is a kernel launch


def slices(stop: int, size: int = PIECE, start: int = 0) -> Iterator[slice]:
    """Yield slices of at most ``size`` elements, from ``start`` to ``stop``."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))
