"""Jobs that are more than data-parallel, as ``mesh=`` of :func:`shardcast.shard` says."""

from __future__ import annotations

from shardcast.extensions.parallel.mesh import groups_of

__all__ = ["groups_of"]
