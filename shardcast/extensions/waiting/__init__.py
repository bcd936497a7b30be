"""Ranks that wait for others, which come to a call late or never, by the lines they are at.

No option asks for it: :func:`shardcast.shard` has several ranks looked after. One thread of the
process does so from the first sharded optimizer until the last one, or its process group, is gone.
"""

from __future__ import annotations

from shardcast.extensions.waiting.lookout import look_after

__all__ = ["look_after"]
