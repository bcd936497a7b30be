"""Ranks that wait for others, which come to a call late or never, by the lines they are at.

No option asks for it: every process has one :class:`.Lookout`, a thread, which
``optimizer/api.py`` installs.
"""

from __future__ import annotations

from shardcast.extensions.waiting.lookout import Lookout

__all__ = ["Lookout"]
